import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.questions import load_questions
from quant.evaluate.report import as_text
from quant.evaluate.run import EvalSettings, evaluate_server
from quant.evaluate.server import WINDOW_CHARACTERS, ServerModel

TEXT = Text("abcd" * 1500, "letters")


class Server(ThreadingHTTPServer):
    """What it answers with, and what was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does; tokens are pairs of characters, and the k-th of a prompt has log-probability -k."""

    server: Server

    def do_GET(self):
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.status != 200:
            self._answer(self.server.status, {"error": {"message": "no such luck"}})
            return
        prompt = body["prompt"]
        choice: dict[str, Any] = {"text": " and so on", "logprobs": None}
        if body.get("echo"):
            starts = list(range(0, len(prompt), 2))
            choice["logprobs"] = {
                "tokens": [prompt[start : start + 2] for start in starts],
                "text_offset": starts,
                "token_logprobs": [None] + [-float(place) for place in range(1, len(starts))],
            }
        self._answer(200, {"choices": [choice]})

    def _answer(self, status, answer):
        text = json.dumps(answer).encode()
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def model(server: Any, **options: Any) -> ServerModel:
    return ServerModel(f"http://127.0.0.1:{server.server_port}", **options)


def test_the_model_is_asked_for_its_name_and_given_the_key(server):
    assert model(server, key="secret").connected().name == "tiny"
    assert server.keys == ["Bearer secret"]
    assert "secret" not in repr(model(server, key="secret"))
    with pytest.raises(QuantError, match="expected the model huge, got tiny"):
        model(server, name="huge").connected()


def test_a_score_is_what_the_continuation_adds_to_the_prompt(server):
    one = model(server, name="tiny")

    assert one.score("abcd", "efgh") == -2 - 3
    assert one.score("abc", "defgh") == -2 - 3
    assert server.bodies[0] == {
        "model": "tiny",
        "temperature": 0,
        "prompt": "abcdefgh",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
    }


def test_text_is_measured_in_windows_until_enough_tokens_are_scored(server):
    per_window = WINDOW_CHARACTERS // 2 - 1

    result = model(server, name="tiny").measure_text(TEXT, tokens=per_window + 1)

    losses = list(range(1, per_window + 1)) * 2
    assert [len(body["prompt"]) for body in server.bodies] == [WINDOW_CHARACTERS] * 2
    assert result.tokens == 2 * per_window
    assert result.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / (2 * WINDOW_CHARACTERS))
    assert result.kl is None


def test_a_report_of_a_server_says_what_it_could_not_measure(server):
    report = evaluate_server(model(server), EvalSettings(TEXT, ("questions", "long"), long_tokens=20))

    assert report.model.name.startswith("tiny at http://127.0.0.1")
    assert report.model.questions is not None
    assert report.model.long_output is not None
    assert report.model.questions.questions == len(load_questions())
    assert report.model.long_output.outputs[0].text == " and so on"
    assert report.model.text is None
    assert any("KL divergence was not measured" in note for note in report.notes)


def test_a_report_of_a_server_counts_the_tokens_it_measured(server):
    """More than were asked for: whole windows are measured, and they are cut by characters."""
    report = evaluate_server(model(server), EvalSettings(TEXT, ("text",), tokens=1200, window=512))

    measured = 2 * (WINDOW_CHARACTERS // 2 - 1)
    assert report.model.text is not None
    assert report.model.text.tokens == measured > 1200
    assert (report.settings["tokens"], report.settings["tokens_asked"]) == (measured, 1200)
    assert "window" not in report.settings
    assert f"tokens measured: {measured}" in as_text(report)


def test_an_error_of_the_server_is_shown_with_the_url(server):
    server.status = 503

    with pytest.raises(QuantError, match=r"http://127.*/v1/completions: expected success, got 503: .*no such luck"):
        model(server, name="tiny").generate("a", 5)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(QuantError, match=r"http://127\.0\.0\.1:1/v1/models: expected an answer, got ConnectError"):
        ServerModel("http://127.0.0.1:1").connected()


def test_a_server_without_echo_is_refused(server, monkeypatch):
    def without_echo(handler):
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler._answer(200, {"choices": [{"text": "x"}]})

    monkeypatch.setattr(Handler, "do_POST", without_echo)

    with pytest.raises(QuantError, match="expected echoed log-probabilities, got None"):
        model(server, name="tiny").score("a", "b")


def test_w4a4_is_refused(server):
    with pytest.raises(QuantError, match="W4A4: expected a model directory, got a server"):
        evaluate_server(model(server), EvalSettings(TEXT, w4a4=True))
