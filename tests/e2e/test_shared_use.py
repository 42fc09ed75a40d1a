"""Keys and their tokens with the real engine: clients get what it would have sent them, and every token is booked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.keys import add_key
from server.usage import Counts, UsageFile, usage_path
from tests.waiting import wait_until

from .conftest import MODEL, Service, serving

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 12},
    CHAT: {"messages": [{"role": "user", "content": "Say hello in five words"}], "max_tokens": 12},
    RESPONSES: {"input": "Say hello in five words", "max_output_tokens": 12},
}
WITH_USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass
class Shared:
    service: Service
    keys: Path
    engine: httpx.Client  # past the gateway
    made: int = 0

    def key(self) -> tuple[str, str]:
        """A key of its own for a test: its name, and what to send."""
        self.made += 1
        name = f"key{self.made}"
        return name, add_key(self.keys, name)

    def counts(self, name: str, requests: int) -> Counts:
        """What the file has of a key, once it has so many requests."""
        file = UsageFile(usage_path(str(self.keys), ""))

        def found() -> Counts | None:
            rows = file.since(datetime.now(timezone.utc).date())
            total = sum((row.counts for row in rows if row.key == name), Counts())
            return total if total.requests == requests else None

        counts: Counts = wait_until(found, 30, f"{requests} requests of {name} in the file")
        return counts


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    add_key(folder / "keys.json", "first")
    with serving(folder / "log", "--keys-file", str(folder / "keys.json")) as service:
        arguments = [word for process in service.processes() for word in process.cmdline()]
        socket = next(word for word in arguments if word.endswith("engine.sock"))
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://engine", timeout=120) as engine:
            yield Shared(service, folder / "keys.json", engine)


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, **BODIES[path], **more}


def ask(shared: Shared, key: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{shared.service.url}{path}", json=body_of(path, **more), headers=headers, timeout=120)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def forms(stream: list[dict[str, Any]]) -> set[str]:
    """What kinds of events there are: their fields in order, and in which of them the usage has any.

    vLLM names its fingerprint in a stream's last event. That is the usage's, which the gateway asks for and takes out.
    """
    return {
        str(
            [
                (name, value and list(value) if name in {"usage", "choices"} else None)
                for name, value in one.items()
                if name != "system_fingerprint"
            ]
        )
        for one in ({**event, "choices": [list(choice) for choice in event["choices"]]} for event in stream)
    }


def texts(stream: list[dict[str, Any]]) -> dict[int, str]:
    """Each choice's text. The engine cuts it into events as time has it."""
    of: dict[int, str] = {}
    for choice in (choice for event in stream for choice in event["choices"]):
        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
        of[choice["index"]] = of.get(choice["index"], "") + piece
    return of


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "more",
    [
        {},
        WITH_USAGE,
        CONTINUOUS,
        {"stream_options": {"continuous_usage_stats": True}},
        {"n": 2, "logprobs": 1, "temperature": 1, "seed": 7},
        {"stream_options": None},
    ],
    ids=lambda more: json.dumps(more)[:50],
)
def test_a_stream_is_as_the_engine_sends_it_and_counted_as_it_says(
    shared: Shared, path: str, more: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in more:
        more = {**more, "logprobs": True}
    name, key = shared.key()
    mine = ask(shared, key, path, stream=True, **more)
    theirs = shared.engine.post(path, json=body_of(path, stream=True, **more))
    assert mine.status_code == 200, mine.text
    assert texts(events(mine.text)) == texts(events(theirs.text))
    assert forms(events(mine.text)) == forms(events(theirs.text))
    said = shared.engine.post(path, json=body_of(path, **{k: v for k, v in more.items() if k != "stream_options"}))
    usage = said.json()["usage"]
    assert shared.counts(name, 1) == Counts(1, 0, usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_an_answer_in_one_piece_is_counted_as_it_says(shared: Shared, path: str) -> None:
    name, key = shared.key()
    usage = ask(shared, key, path).json()["usage"]
    prompt, completion = (
        ("input_tokens", "output_tokens") if path == RESPONSES else ("prompt_tokens", "completion_tokens")
    )
    assert usage[completion]
    assert shared.counts(name, 1) == Counts(1, 0, usage[prompt], usage[completion])


def test_a_streamed_response_is_counted_as_it_says(shared: Shared) -> None:
    name, key = shared.key()
    text = ask(shared, key, RESPONSES, stream=True).text
    last = json.loads([line for line in text.splitlines() if line.startswith("data: {")][-1].removeprefix("data: "))
    usage = last["response"]["usage"]
    assert shared.counts(name, 1) == Counts(1, 0, usage["input_tokens"], usage["output_tokens"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_who_leaves_early_pays_for_what_was_made_by_then(shared: Shared, path: str) -> None:
    name, key = shared.key()
    before = shared.service.metric("vllm:generation_tokens_total")
    body = body_of(path, stream=True, max_tokens=4000, ignore_eos=True)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{shared.service.url}{path}", json=body, headers=headers, timeout=60) as reply:
        pieces = 0
        for line in reply.iter_lines():
            pieces += line.startswith("data: {")
            if pieces == 20:
                break
    wait_until(lambda: shared.service.metric("vllm:num_requests_running") == 0, 20, "the engine is idle")
    counts = shared.counts(name, 1)
    assert counts.uncounted == 0
    assert counts.prompt > 0
    assert 18 <= counts.completion <= shared.service.metric("vllm:generation_tokens_total") - before


def test_what_the_engine_refuses_costs_nothing(shared: Shared) -> None:
    name, key = shared.key()
    assert ask(shared, key, COMPLETIONS, stream=True, stream_options={"include_usage": "maybe"}).status_code == 400
    assert ask(shared, key, COMPLETIONS, stream=True, temperature=-1).status_code == 400
    assert ask(shared, key, COMPLETIONS, stream_options={"include_usage": True}).status_code == 400
    assert ask(shared, key, COMPLETIONS, max_tokens=1).status_code == 200
    assert shared.counts(name, 1).completion == 1


def test_a_budget_ends_at_its_tokens(shared: Shared) -> None:
    key = add_key(shared.keys, "small", tokens_per_day=20)
    assert [ask(shared, key, CHAT).status_code for _ in range(3)][-1] == 429
