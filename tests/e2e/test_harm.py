"""The harness finds harm: on services that are faulty on purpose, without an engine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.extremes import Extreme
from tests.e2e.fields import COMPLETIONS
from tests.e2e.harm import Run, verdict
from tests.e2e.state import DESCRIPTORS, GAUGES, MEMORY_MIB, State

ODD = Extreme(COMPLETIONS, ("top_p",), frozenset({"top_p"}), b'{"top_p": 9}', "odd", long=False)


def refusal(param: str | None, **more: Any) -> str:
    return json.dumps({"error": {"message": "m", "type": "t", "param": param, "code": 400, **more}})


@pytest.mark.parametrize(
    ("expected", "status", "text", "fault"),
    [
        ("odd", 200, "{}", ""),
        ("odd", 400, refusal("top_p"), ""),
        ("odd", 400, refusal("top_p.0"), ""),
        ("odd", 400, refusal("top_p[0]"), ""),
        ("odd", 400, refusal(None, code="invalid_json"), ""),
        ("odd", 400, refusal(None), "names None"),
        ("odd", 400, refusal("n"), "names 'n'"),
        ("odd", 400, refusal("top_p", detail="x"), "form"),
        ("odd", 400, '{"detail": "x"}', "form"),
        ("odd", 400, "[]", "form"),
        ("odd", 400, "", "form"),
        ("odd", 500, refusal("top_p"), "a 500"),
        ("refused", 200, "{}", "must be refused"),
        ("taken", 400, refusal("top_p"), "must be taken"),
    ],
)
def test_an_answer_is_judged(expected: str, status: int, text: str, fault: str) -> None:
    extreme = Extreme(ODD.route, ODD.names, ODD.about, ODD.body, expected, ODD.long)
    found = verdict(extreme, status, text)
    assert (fault in found) if fault else not found


class Faulty(BaseHTTPRequestHandler):
    """Streams one text to everybody, until it has seen a `top_p` of 9; then another, or none."""

    seen = False
    afterwards = "harmed"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind = type(self)
        kind.seen = kind.seen or body.get("top_p") == 9
        text = kind.afterwards if kind.seen else "whole"
        ended = "data: [DONE]\n\n" if text else ""
        answer = f"data: {json.dumps({'choices': [{'text': text}]})}\n\n{ended}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


class Stand:
    """What `Run` needs of a service."""

    def __init__(self, url: str) -> None:
        self.url = url

    def health(self) -> tuple[int, dict[str, Any]]:
        return 200, {"restarts": 0}

    def wait_ready(self) -> None: ...


@contextlib.contextmanager
def faulty(text: str) -> Iterator[Stand]:
    handler = type("Handler", (Faulty,), {"afterwards": text})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Stand(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("text", "fault"), [("whole", ""), ("harmed", "became 'harmed'"), ("", "broke")])
def test_a_request_that_changes_or_ends_others_streams_is_found_out(text: str, fault: str) -> None:
    with faulty(text) as service:
        found = Run(service).run([ODD] * 50, seconds=30)  # type: ignore[arg-type]
    assert found.answered.total()
    assert any(fault in one.what and ODD in one.suspects for one in found.faults) if fault else not found.faults


def test_a_state_that_is_not_as_before_is_told() -> None:
    before = State((1, 2), 0, dict.fromkeys(GAUGES, 0.0), {1: 9, 2: 9}, 1000)
    assert not before.differences(State((1, 2), 0, before.busy, {1: 8, 2: 9 + DESCRIPTORS}, 1000 + MEMORY_MIB))
    for changed in (
        State((1, 3), 0, before.busy, {1: 9, 3: 9}, 1000),
        State((1, 2), 1, before.busy, before.descriptors, 1000),
        State((1, 2), 0, dict.fromkeys(GAUGES, 1.0), before.descriptors, 1000),
        State((1, 2), 0, before.busy, {1: 10 + DESCRIPTORS, 2: 9}, 1000),
        State((1, 2), 0, before.busy, before.descriptors, 1001 + MEMORY_MIB),
    ):
        assert len(before.differences(changed)) == 1, changed
