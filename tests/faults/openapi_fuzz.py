"""Requests made from the gateway's own OpenAPI document by schemathesis, sound and broken, over a socket.

    .venv/bin/python -m tests.faults.openapi_fuzz --out docs/results/gateway-fuzz-DATE.json

runs them against a gateway before a fake engine that judges requests by the same document.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import make_model, serving

CHECKS = [
    not_a_server_error,  # a 500 of ours
    negative_data_rejection,  # a wrong 200
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
LIMIT = 10.0  # seconds for an answer: anything longer is a hang


@dataclass
class Outcome:
    """What was sent, by mode, and answered, by status; `slowest` in seconds."""

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0


def fuzz(url: str, examples: int, seed: int) -> Outcome:
    """Sends up to `examples` requests of each mode to each operation of the document at `url`.

    Raises:
        schemathesis' failures, all of a request's at once, with a curl command that repeats it; a timeout of requests.
    """
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").raise_for_status().json())
    outcome = Outcome()

    def ask(case: Any) -> None:
        began = time.monotonic()
        answer = case.call(base_url=url, timeout=LIMIT)
        outcome.slowest = max(outcome.slowest, time.monotonic() - began)
        outcome.sent[case.meta.generation.mode.value] += 1
        outcome.answered[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    few = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation, mode in operations(schema):
        few(seeded(seed)(given(operation.as_strategy(generation_mode=mode))(ask)))()
    return outcome


def operations(schema: Any) -> Iterator[tuple[Any, GenerationMode]]:
    """Each operation, in each mode that it has: what takes no more than a text cannot be asked wrongly."""
    for found in schema.get_all_operations():
        operation = found.ok()
        yield operation, GenerationMode.POSITIVE
        if operation.body:
            yield operation, GenerationMode.NEGATIVE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=400, help="requests of each mode to each operation")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "m", judge=True)
        with serving(model, "--max-body-bytes", "4000") as served:
            served.wait_for_state("ready")
            outcome = fuzz(served.url, args.examples, args.seed)
            health, body = served.health()
    result = {
        "kind": "measured",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": " ".join(["python -m tests.faults.openapi_fuzz", *sys.argv[1:]]),
        "sent": dict(outcome.sent),
        "answered": {str(status): count for status, count in sorted(outcome.answered.items())},
        "slowest_answer_s": round(outcome.slowest, 3),
        "checks": [check.__name__ for check in CHECKS],
        "failures": 0,  # the first would have ended the run
        "health_afterwards": [health, body["state"]],
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
