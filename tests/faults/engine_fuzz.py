"""Requests made from the gateway's OpenAPI document by schemathesis, at the real engine, for some minutes.

    .venv/bin/python -m tests.faults.engine_fuzz --minutes 15 --out docs/results/engine-fuzz-DATE.json

It covers every operation, with sound and broken requests. Sound ones are made from the document, and from a narrower
one whose requests mostly succeed. Values that could rightly cost minutes are capped: tokens to be generated, and
sequences.
"""

import argparse
import copy
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode

from tests.e2e.conftest import MODEL, Service, serving
from tests.e2e.state import settled
from tests.faults.openapi_fuzz import CHECKS, operations

HANG_S = 120.0  # for one answer: a bound on a hang, not a check of speed
AT_ONCE = 8  # requests of one operation before the next operation
WORKERS = 2
EXAMPLES_KEPT = 5  # of each kind of failure
# Fields that decide how long an answer takes; `None` where a request may do without, else what is filled in.
CAPS: dict[str, dict[str, tuple[int, int | None]]] = {
    "/v1/completions": {"max_tokens": (6, None), "n": (2, None)},
    "/v1/chat/completions": {"max_tokens": (6, 6), "max_completion_tokens": (6, None), "n": (2, None)},
    "/v1/responses": {"max_output_tokens": (6, 6)},
}


@dataclass
class Outcome:
    """What was sent and answered by one process."""

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def failed(self, kind: str, example: str) -> None:
        """Counts a failure and keeps the first few of its kind."""
        self.failures[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < EXAMPLES_KEPT:
            kept.append(example[:1500])

    def add(self, other: "Outcome") -> None:
        """Takes in another process's."""
        self.sent += other.sent
        self.answered += other.answered
        self.slowest = max(self.slowest, other.slowest)
        self.failures += other.failures
        for kind, examples in other.examples.items():
            self.examples[kind] = (self.examples.get(kind, []) + examples)[:EXAMPLES_KEPT]


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with values that this engine can serve: its model's name, roles that its template knows, texts."""
    made = copy.deepcopy(document)
    schemas = made["components"]["schemas"]
    schemas["ModelName"] = {"enum": schemas["ModelName"]["examples"]}
    words = {"type": "string", "minLength": 1, "maxLength": 40}
    schemas["Said"] = {  # apart from Message, which answers have, too
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": words},
    }
    for name in ("CompletionRequest", "ChatRequest", "ResponseRequest", "EmbeddingRequest"):
        schemas[name]["additionalProperties"] = False
        schemas[name]["required"] = ["model", *schemas[name]["required"]]
        for unserved in (
            "tools",
            "response_format",
            "stream_options",
            "previous_response_id",
            "logprobs",
            "top_logprobs",
        ):
            schemas[name]["properties"].pop(unserved, None)
    schemas["CompletionRequest"]["properties"]["prompt"] = words
    said = {"$ref": "#/components/schemas/Said"}
    schemas["ChatRequest"]["properties"]["messages"] = {"type": "array", "minItems": 1, "maxItems": 5, "items": said}
    schemas["ResponseRequest"]["properties"]["input"] = words
    schemas["Stop"] = {"type": "string", "minLength": 1}
    return made


def capped(path: str, body: Any) -> Any:
    """The body, with what decides the length of its answer cut down."""
    if not isinstance(body, dict):
        return body
    made = dict(body)
    for name, (most, otherwise) in CAPS.get(path, {}).items():
        value = made.get(name)
        if value is None and otherwise is not None:
            made[name] = otherwise
        try:
            number = float(value)  # type: ignore[arg-type]  # what is no number stays as it is
        except (TypeError, ValueError, OverflowError):
            continue
        if number > most:
            made[name] = most
    return made


def fuzz(url: str, until: float, seed: int, turns: int = 10**9, at_once: int = AT_ONCE) -> Outcome:
    """Sends requests of each operation in turn, in each mode and of both documents, until the time `until`."""
    document = httpx.get(f"{url}/openapi.json").raise_for_status().json()
    outcome = Outcome()
    sources = [
        ("", schemathesis.openapi.from_dict(document)),
        ("narrowed ", schemathesis.openapi.from_dict(narrowed(document))),
    ]
    few = settings(
        max_examples=at_once,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def asking(source: str) -> Any:
        def ask(case: Any) -> None:
            if time.time() < until:
                case.body = capped(case.operation.path, case.body)
                _ask(url, case, f"{source}{case.meta.generation.mode.value}", outcome)

        return ask

    for turn in range(turns):
        order = list(_turns(sources))
        random.Random(seed + turn).shuffle(order)  # noqa: S311 - processes ask different operations at a time
        for operation, mode, source in order:
            if time.time() >= until:
                return outcome
            few(seeded(seed + turn)(given(operation.as_strategy(generation_mode=mode))(asking(source))))()
    return outcome


def _turns(sources: list[tuple[str, Any]]) -> Iterator[tuple[Any, GenerationMode, str]]:
    for source, schema in sources:
        for operation, mode in operations(schema):
            if not source or (operation.body and mode is GenerationMode.POSITIVE):
                yield operation, mode, source


def _ask(url: str, case: Any, kind: str, outcome: Outcome) -> None:
    route, method = case.operation.path, case.operation.method.upper()
    began = time.monotonic()
    outcome.sent[kind] += 1
    try:
        answer = case.call(base_url=url, timeout=HANG_S)
    except requests.RequestException as error:
        outcome.failed(f"no answer: {type(error).__name__}", case.as_curl_command())
        return
    outcome.slowest = max(outcome.slowest, (round(time.monotonic() - began, 2), f"{method} {route}"))
    outcome.answered[(method, route, answer.status_code)] += 1
    try:
        case.validate_response(answer, checks=CHECKS)
    except FailureGroup as group:
        for failure in group.exceptions:
            outcome.failed(type(failure).__name__, str(failure) + "\n" + case.as_curl_command())


def report(outcome: Outcome) -> dict[str, Any]:
    """The outcome as a result file has it."""
    routes: dict[str, dict[str, int]] = {}
    for (method, route, status), count in sorted(outcome.answered.items()):
        routes.setdefault(f"{method} {route}", {})[str(status)] = count
    return {
        "sent": dict(outcome.sent),
        "answered": routes,
        "chats_completed": outcome.answered[("POST", "/v1/chat/completions", 200)],
        "answers_of_500_and_above": sum(count for (*_, status), count in outcome.answered.items() if status >= 500),
        "slowest_answer_s": outcome.slowest[0],
        "slowest_route": outcome.slowest[1],
        "checks": [check.__name__ for check in CHECKS],
        "failures": dict(outcome.failures),
        "examples": outcome.examples,
    }


def measure(service: Service, minutes: float, seed: int) -> dict[str, Any]:
    """Fuzzes a service that is ready, and compares it before and after."""
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:

        def at_once(seconds: float, seed: int) -> Outcome:
            until, outcome = time.time() + seconds, Outcome()
            for part in [pool.submit(fuzz, service.url, until, seed + 10**6 * n) for n in range(WORKERS)]:
                outcome.add(part.result())
            return outcome

        at_once(20, seed - 1)  # so that pools of connections have grown before anything is counted
        before = settled(service)
        outcome = at_once(60 * minutes, seed)
    after = settled(service, before)
    return {
        "model": MODEL,
        "minutes": minutes,
        **report(outcome),
        "before": before.as_dict(),
        "after": after.as_dict(),
        "not_as_before": before.differences(after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=20261201)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log") as service:
        measured = measure(service, args.minutes, args.seed)
    result = {
        "kind": "measured",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": " ".join(["python -m tests.faults.engine_fuzz", *sys.argv[1:]]),
        **measured,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
