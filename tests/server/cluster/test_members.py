"""The gateway's pool follows the directory."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from server.cluster.members import Expected, Members
from server.config.settings import load_settings
from server.gateway import Gateway
from tests.server.cluster.nodes import Node, node, until
from tests.server.conftest import make_model

MODELS = {"m": Expected(("m",), 1), "other": Expected(("other", "too"), 1)}


class Here:
    """A gateway whose directory is a dictionary of this test's."""

    def __init__(self) -> None:
        settings = load_settings(["--heartbeat-timeout", "5"], {}, "cluster.yaml", ())
        self.members = Members(settings, MODELS)
        self.gateway = Gateway(settings, self.members.pool, self.members.gpus)
        self.members.report_to(self.gateway.metrics)
        transport = httpx.ASGITransport(self.gateway.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60)

    def tell(self, *nodes: Node, models: Mapping[str, Expected] = MODELS, **failures: str) -> None:
        """As a look into the directory."""
        listed = [{"name": name, **asdict(one)} for name, one in models.items()]
        self.members.take({"models": listed, "replicas": [asdict(one.address) for one in nodes], "failures": failures})

    async def health(self) -> tuple[int, dict[str, dict[str, Any]]]:
        answer = await self.client.get("/health")
        return answer.status_code, {one["name"]: one for one in answer.json()["engines"]}

    async def ask(self, model: str) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": model, "prompt": "Hi"})

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text


def ready(here: Here) -> list[str]:
    return [one.name for one in here.members.pool.upstreams if one.ready]


async def test_models_without_a_replica_are_known_and_told_why() -> None:
    here = Here()
    code, engines = await here.health()
    assert (code, set(engines)) == (503, {"m", "other"})
    assert {one["state"] for one in engines.values()} == {"starting"}
    for model in ("m", "too"):
        refused = await here.ask(model)
        assert refused.status_code == 503
        assert "0 of 1 replicas are there" in refused.json()["error"]["message"]
    assert (await here.ask("unknown")).status_code == 404
    assert (await here.client.get("/v1/models")).status_code == 503
    here.tell(m="GPU 0 has fallen off the bus")
    assert "fallen off the bus" in (await here.health())[1]["m"]["reason"]
    assert 'voltserve_state{replica="m",state="starting"} 1.0' in await here.metrics()


async def test_replicas_come_share_the_requests_and_go(tmp_path: Path) -> None:
    here = Here()
    async with node(make_model(tmp_path / "m")) as one, node(make_model(tmp_path / "n"), "two") as two:
        await until(lambda: all("ready" in each.states for each in (one, two)), "ready")
        here.tell(one, two)
        await until(lambda: len(ready(here)) == 2, "both are in")
        answers = await asyncio.gather(*(here.ask("m") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        text = await here.metrics()
        for name in ("m-one", "m-two"):
            assert f'voltserve_state{{replica="{name}",state="ready"}} 1.0' in text
            tokens = f'vllm:generation_tokens_total{{replica="{name}",engine="0"}} '
            assert float(text.partition(tokens)[2].split()[0]) > 0
        assert 'replica="m",' not in text, "the stand-in is gone"
        assert (await here.client.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert "other" in (await here.health())[1]

        here.tell(two)
        assert len(ready(here)) == 2, "one that answers stays, though the directory has forgotten it"
        one.process.kill()
        await until(lambda: ready(here) == ["m-two"], "one is missed")
        assert (await here.ask("m")).status_code == 200
        here.tell(two, models={**MODELS, "m": Expected(("m",), 2)})
        _, engines = await here.health()
        assert "1 of 2 replicas" in engines["m"]["reason"], "that one is missing is told"
        here.tell(two)
        assert 'replica="m-one"' not in await here.metrics()
        assert [one.name for one in here.members.pool.upstreams] == ["m-two", "other"]

        two.process.terminate()
        await until(lambda: [one.name for one in here.members.pool.upstreams] == ["m", "other"], "it has ended")
        here.tell(models={"m": Expected(("m", "new-name"), 1), "third": Expected(("third",), 1)})
        assert set((await here.health())[1]) == {"m", "third"}
        await here.members.close()
