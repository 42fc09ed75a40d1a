"""Nothing that a client wrote reaches those who ask without a key: `/health`, `/metrics`, the diagnosis of a crash.

The fake engine prints what clients send in every way in which vLLM's processes do; the real one is in
tests/e2e/test_start_failures.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import LIMIT, Served, make_model, serving, wait_for

CANARY = "kanarienvogel"
# Each is, or looks like, what some entry of the catalogue matches.
MISLEADING = (
    "CUDA out of memory. Tried to allocate 2 MiB",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB",
    "the engine died: EngineCore was killed by SIGILL",
    "OSError: [Errno 28] No space left on device",
    "[rank0]:[E1129 20:31:44.1 a.cpp:6] Watchdog caught collective operation timeout: x",
    "(EngineCore pid=2) ERROR 11-29 21:39:27 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
)
TEXTS = [f"{between}{text} {CANARY}" for text in MISLEADING for between in ("", "x\n", "x\r")]


def requests(model: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with `text` in every field that takes one; vLLM refuses some, and fails at others."""
    completion = {"model": model, "prompt": "Hi", "max_tokens": 2}
    of_completions: list[dict[str, Any]] = [
        {"prompt": text},
        {"model": text},
        {"logit_bias": {text: 1}},
        {"stop": [text]},
        {"user": text},
        {"suffix": text},
        {"temperature": text},
        {"structured_outputs": {"grammar": text}},
        {"structured_outputs": {"regex": text}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": text, "schema": {"type": text}}}},
        {"request_id": text},
        {"cache_salt": text},
        {"vllm_xargs": {text: text}},
        {text: text},
    ]
    for extra in of_completions:
        yield "/v1/completions", {**completion, **extra}
    chat = {"model": model, "max_tokens": 2}
    message = {"role": "user", "content": text}
    function = {"name": text, "description": text, "parameters": {"type": text}}
    of_chats: list[dict[str, Any]] = [
        {"messages": [message]},
        {"messages": [{**message, "role": text}]},
        {"messages": [{**message, "name": text}]},
        {"messages": [message], "tools": [{"type": "function", "function": function}]},
        {"messages": [message], "chat_template": "{{ raise_exception(" + json.dumps(text) + ") }}"},
        {"messages": [message], "chat_template_kwargs": {text: text}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": text}}]}]},
    ]
    for extra in of_chats:
        yield "/v1/chat/completions", {**chat, **extra}


def told(url: str) -> str:
    """Everything that the gateway shows without a key."""
    return "".join(httpx.get(f"{url}{path}").text for path in ("/health", "/metrics", "/version", "/", "/openapi.json"))


def send(url: str, model: str, text: str) -> None:
    """All the requests, and the text where else a client may put one."""
    with httpx.Client(base_url=url, timeout=LIMIT) as client:
        for path, body in requests(model, text):
            client.post(path, json=body)
        one = " ".join(text.split())
        client.get("/v1/models", params={one: one}, headers={"x-request-id": one, "user-agent": one, "x-canary": one})
        client.post(f"/v1/{one.replace('/', ' ')}", content=text.encode())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server, whose engine prints whatever it is sent."""
    model = make_model(tmp_path_factory.mktemp("words") / "m", repeat=True)
    with serving(model, "--hang-timeout", "5") as server:
        server.wait_for_state("ready")
        yield server


def test_a_crash_tells_nothing_of_what_clients_wrote_and_is_no_other_crash_for_it(served: Served) -> None:
    for text in TEXTS:
        send(served.url, str(served.model), text)
    assert CANARY in served.log.read_text(), "the engine has not printed it: this test could not fail"
    assert CANARY not in told(served.url)
    restarts = served.health()[1]["restarts"]
    fault = {"kill_after": 1, "fault": ["ValueError", f"grammar: {TEXTS[0]}"]}
    assert served.post(fake=fault).status_code in {502, 503}
    body = wait_for(lambda: (now := served.health()[1]) and now["diagnosis"] and now, "a diagnosis")
    assert body["diagnosis"]["id"] == "killed-for-memory", "as without any client"
    assert CANARY not in told(served.url)
    served.wait_for_state("ready")
    body = served.health()[1]
    assert body["restarts"] == restarts + 1
    assert body["last_exit"].endswith(" | ValueError (its message is in the log)")
    assert CANARY not in told(served.url)


@pytest.mark.parametrize("text", MISLEADING)
def test_what_a_client_wrote_does_not_make_a_diagnosis(tmp_path: Path, text: str) -> None:
    model = make_model(tmp_path / "m", repeat=True)
    with serving(model) as server:
        server.wait_for_state("ready")
        for between in ("", "x\n", "x\r"):
            server.post(prompt=f"{between}{text}")
        (model / "dead").touch()
        body = server.wait_for_state("failed", "starting")
        (model / "dead").unlink()
        assert "core process died" in body["last_exit"]
        assert body["diagnosis"] is None
        assert " | " not in body["last_exit"]
