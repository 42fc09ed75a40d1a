"""The OpenAPI document describes the gateway's routes, limits and answers."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from server.diagnosis import Diagnosis
from server.gateway.openapi import document
from server.gateway.routes import OWN, PROXIED
from server.keys import add_key
from server.supervisor import State
from server.supervisor.states import Progress
from tests.server.gateway.inprocess import Engine, InProcess, config_of

DOCUMENT = document(config_of(), ["m"])


def valid(value: Any, schema: str) -> None:
    """Raises where `value` does not fit a schema of the document."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


async def test_the_document_is_served_to_everybody(tmp_path: Path) -> None:
    add_key(tmp_path / "keys", "ann")
    here = InProcess("--keys-file", str(tmp_path / "keys"), "--max-body-bytes", "777")
    served = (await here.client.get("/openapi.json")).json()
    assert "777 bytes" in served["info"]["description"]
    assert served["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in served["paths"]["/health"]["get"]
    valid(served, "Document")


def test_its_paths_are_the_gateway_s_routes_and_none_of_the_engine_s_admin() -> None:
    gateway = InProcess().gateway
    routes = {
        (method, route.path.replace(":path", ""))
        for route in gateway.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    told = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == routes
    assert not [path for _, path in told if path.startswith(("/sleep", "/v1/load", "/reset", "/collective", "/stats"))]


def test_every_schema_is_sound_and_used_and_every_reference_has_its_target() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    referred = set(_references(DOCUMENT))
    targets = {
        f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in DOCUMENT["components"][kind]
    }
    assert referred - targets == set()
    of_keys = {"#/components/responses/Error401", "#/components/responses/Error403"}
    assert targets - referred == of_keys, "those of a gateway with keys"


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [one for part in value.values() for one in _references(part)]
    return [one for part in value for one in _references(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("state", list(State))
async def test_health_fits_its_schema_in_every_state(state: State) -> None:
    engines = (Engine("a", ("a",)), Engine("b", ("b",)))
    engines[0].status = replace(
        engines[0].status,
        state=state,
        progress=Progress("weights", 1, 2, "bytes"),
        retry_at=time.monotonic() + 1,
        last_exit="exited with code 1",
        diagnosis=Diagnosis("oom", "Out of memory", "memory", "cause", ("remedy",), "found"),
        warnings=("odd",),
    )
    for here in (InProcess(engines=engines), InProcess()):
        for path in ("/health", "/health/ready"):
            valid((await here.client.get(path)).json(), "Health")


async def test_answers_of_the_other_routes_fit_their_schemas() -> None:
    here = InProcess()
    for own in OWN:
        if own.schema and own.schema != "Health":
            valid((await here.client.get(own.path.replace("{model}", "m"))).json(), own.schema)
    for route in PROXIED:
        if route.has_body:
            body = {"model": "m", "prompt": "Hi", "input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
            valid((await here.client.post(route.path, json=body)).json(), route.response)
    unknown = await here.client.get("/nope")
    valid(unknown.json(), "Error")
