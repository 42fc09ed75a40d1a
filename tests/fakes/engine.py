"""A stand-in for `python -m engine`: the same command line and progress datagrams, a fake model, and faults on demand.

`fake.json` in the model directory says how it starts (see `Start`). The object `fake` of a request says how it answers
(see `Answer`). `GET /stats` returns what it has seen.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from engine import progress
from engine.process import follow_supervisor

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} %(running)d
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} %(tokens)d
# HELP voltserve_requests_total A name that is the gateway's.
# TYPE voltserve_requests_total counter
voltserve_requests_total{route="fake"} 7.0
"""


@dataclass(frozen=True)
class Start:
    """What happens at start, in this order."""

    ignore_sigterm: bool = False
    spawn: bool = False  # leave a child in the process group, as vLLM's EngineCore is
    quiet: bool = False  # send no progress
    print_lines: tuple[str, ...] = ()
    load_seconds: float = 0.0
    fail_first: int = 0  # so many starts end in an error
    hang: bool = False  # never listen
    refusal: tuple[int, str] | None = None  # status and message with which completions are answered
    repeat: bool = False  # print what clients send, in every way in which vLLM's processes do
    pooling: bool = False  # no completions, only embeddings
    judge: bool = False  # requests that do not fit the gateway's OpenAPI document are refused
    odd: bool = False  # log-probabilities of a model that repeats one token
    answer: dict[str, Any] = field(default_factory=dict)  # the Answer of requests without one of their own
    fail_every: int = 0  # each so manieth streamed completion answers 500
    when: dict[str, dict[str, Any]] = field(default_factory=dict)  # what differs where the command line has this text


@dataclass(frozen=True)
class Answer:
    """How one request is answered."""

    tokens: int = 3  # or max_tokens, where the request says ignore_eos
    first_delay: float = 0.0  # seconds before the first token, beside its `delay`
    delay: float = 0.0  # seconds before each token
    word: str = "字"  # what each token's text begins with
    score: float = -1.0  # the log-probability of each token of an echoed prompt
    kill_after: int | None = None  # SIGKILL to ourselves after so many tokens
    fault: tuple[str, str] | None = None  # reported before that: an exception's type and message
    error_after: int | None = None  # an error event after so many tokens, as vLLM reports errors in a stream
    half_event: bool = False  # the last token before the kill is cut in the middle


class FakeEngine:
    """The application and its counters."""

    def __init__(self, model: Path, names: list[str], start: Start) -> None:
        self.model = model
        self.names = names
        self.start = start
        self.responses: set[str] = set()
        self.stats: dict[str, Any] = {
            "running": 0,
            "tokens": 0,
            "aborted": 0,
            "finished": 0,
            "streams": 0,
            "headers": {},
        }
        self.app: ASGIApp = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/stats", self.show_stats),
                Route("/metrics", self.metrics),
                Route("/sleep", self.health, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/v1/responses", self.respond, methods=["POST"]),
                Route("/v1/responses/{id}", self.kept),
                Route("/v1/responses/{id}/cancel", self.kept, methods=["POST"]),
                *([] if start.pooling else [Route("/v1/completions", self.complete, methods=["POST"])]),
                *([] if start.pooling else [Route("/v1/chat/completions", self.complete, methods=["POST"])]),
            ]
        )
        if start.judge:
            from tests.fakes.judge import Judge  # it needs the gateway, which no other fake engine loads

            self.app = Judge(self.app, names[0])

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if (self.model / "dead").exists() else 200)

    async def show_stats(self, _: Request) -> Response:
        return JSONResponse({**self.stats, "environment": dict(os.environ), "argv": sys.argv[1:]})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(METRICS % self.stats)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]})

    async def embeddings(self, request: Request) -> Response:
        vector = {"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        model = (await request.json()).get("model", self.names[0])
        return JSONResponse({"object": "list", "data": [vector], "model": model, "usage": usage})

    async def respond(self, request: Request) -> Response:
        body = await request.json()
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.responses:
            return _not_found(f"Response with id '{previous}' not found.")
        made = f"resp_{len(self.responses)}_{id(self)}"
        self.responses.add(made)
        return JSONResponse({"id": made, "object": "response", "status": "completed", "output": []})

    async def kept(self, request: Request) -> Response:
        which = request.path_params["id"]
        if which not in self.responses:
            return _not_found(f"Response with id '{which}' not found.")
        seen = {"query": request.url.query, "method": request.method}
        return JSONResponse({"id": which, "object": "response", "status": "completed", "output": [], **seen})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        body["model"] = body.get("model") or self.names[0]  # vLLM too takes it for the only model
        self.stats["headers"] = dict(request.headers)
        if self.start.repeat:
            repeat_all({**body, "headers": dict(request.headers)})
        if self.start.refusal:
            status, message = self.start.refusal
            return JSONResponse({"error": {"message": message, "code": status}}, status)
        if body["model"] not in self.names:
            return _not_found(f"The model `{body['model']}` does not exist.")
        answer = Answer(**{**self.start.answer, **body.get("fake", {})})
        if body.get("ignore_eos"):
            answer = replace(answer, tokens=body["max_tokens"])
        chat = request.url.path.endswith("chat/completions")
        if body.get("stream"):
            self.stats["streams"] += 1
            if self.start.fail_every and self.stats["streams"] % self.start.fail_every == 0:
                return JSONResponse({"error": {"message": "no room left", "code": 500}}, 500)
            events = self.events(body, answer, chat=chat)
            return StreamingResponse(events, media_type="text/event-stream")
        text = ""
        self.stats["running"] += 1
        try:
            for index in range(answer.tokens):
                text += await self.token(answer, index)
                if await request.is_disconnected():
                    self.stats["aborted"] += 1
                    return Response(status_code=499)
            self.stats["finished"] += 1
        finally:
            self.stats["running"] -= 1
        choice = {"index": 0, "finish_reason": "stop", **_content(text, chat=chat, stream=False)}
        if body.get("logprobs") and not chat:
            tokens = ["字"] * 12 if self.start.odd else text.split()
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-0.01] * len(tokens)}
        if body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *[answer.score] * len(str(body["prompt"]).split())]}
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = [sum(word.encode()) for word in body["prompt"].split()]
        return JSONResponse(
            {**_head(body, chat=chat, stream=False), "choices": [choice], "usage": _usage(body, answer.tokens)}
        )

    async def token(self, answer: Answer, index: int) -> str:
        while (self.model / "hung").exists():  # noqa: ASYNC110 — a fault that tests switch on and off
            await asyncio.sleep(0.05)
        await asyncio.sleep(
            answer.delay + (0 if index else answer.first_delay)
        )  # also lets what was written before leave the process
        if index == answer.kill_after:
            if answer.fault:
                progress.fault(*answer.fault)
            os.kill(os.getpid(), signal.SIGKILL)
        self.stats["tokens"] += 1
        return f"{answer.word}{index} "

    async def events(self, body: dict[str, Any], answer: Answer, *, chat: bool) -> AsyncIterator[bytes]:
        head = _head(body, chat=chat, stream=True)
        options = body.get("stream_options") or {}
        each = options.get("include_usage") and options.get("continuous_usage_stats")
        self.stats["running"] += 1
        ended = False
        try:
            for index in range(answer.tokens):
                if index == answer.error_after:
                    failed = {"message": "the cache is full", "type": "BadRequestError", "param": None, "code": 400}
                    yield _event({"error": failed})
                    break
                choice = {"index": 0, "finish_reason": None}
                text = await self.token(answer, index)
                usage = {"usage": _usage(body, index + 1)} if each else {}
                event = _event({**head, "choices": [{**choice, **_content(text, chat=chat, stream=True)}], **usage})
                if answer.half_event and index + 1 == answer.kill_after:
                    event = event[: len(event) // 2]
                yield event
            if options.get("include_usage"):
                yield _event({**head, "choices": [], "usage": _usage(body, answer.tokens)})
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.stats["running"] -= 1
            self.stats["finished" if ended else "aborted"] += 1


def strings_of(value: Any) -> list[str]:
    """All texts in a JSON value, as they are."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *strings_of(item))]
    if isinstance(value, list):
        return [text for item in value for text in strings_of(item)]
    return [value] if isinstance(value, str) else []


def repeat_all(body: dict[str, Any]) -> None:
    """Prints a request, and each of its texts as it is."""
    for text in (str(body), *strings_of(body)):
        repeat(text)


def repeat(text: str) -> None:
    """Prints a client's text as vLLM does: a refused request's traceback, the requests of a step that failed."""
    heads = ("(APIServer pid=1) ", "(APIServer pid=1) ERROR 12-01 03:50:00 [serving.py:1] ")
    for head in (*heads, "(EngineCore pid=2) ERROR 12-01 03:50:00 [dump_input.py:79] Dumping scheduler output: "):
        print("\n".join(f"{head}{line}" for line in text.split("\n")), flush=True)
        print(f"{head}ValueError: {text}".replace("\n", f"\n{head}"), flush=True)


def _not_found(message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "NotFoundError", "param": None, "code": 404}}, 404)


def _head(body: dict[str, Any], *, chat: bool, stream: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": int(time.time()), "model": body["model"]}


def _content(text: str, *, chat: bool, stream: bool) -> dict[str, Any]:
    if not chat:
        return {"text": text, "logprobs": None}
    return {"delta" if stream else "message": {"role": "assistant", "content": text}}


def _usage(body: dict[str, Any], tokens: int) -> dict[str, int]:
    prompt = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 2
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def load(model: Path, start: Start) -> None:
    """What an engine does before it listens."""
    if start.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start.spawn:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (model / "child.pid").write_text(str(child.pid))
    for line in start.print_lines:
        print(line, flush=True)
    count_file = model / "starts"
    starts = int(count_file.read_text()) + 1 if count_file.exists() else 1
    count_file.write_text(str(starts))
    if not start.quiet:
        progress.phase("importing")
        progress.phase("configuring")
        progress.decision("attention", "TRITON_ATTN", "the fake has no other")
        progress.phase("weights")
        weights = progress.WeightsProgress()
        weights.expect(1000)
        weights.advance(400, "model.safetensors")
    time.sleep(start.load_seconds)
    if starts <= start.fail_first:
        raise ValueError(f"shard 5 of 8 is short (start {starts})")
    if not start.quiet:
        weights.advance(600, "model.safetensors")
        progress.phase("warmup")
    while start.hang:
        time.sleep(60)


def pulse(model: Path) -> None:
    """The core's sign of life, as the real one sends it; the file `hung` in the model directory stops it."""
    while True:
        if not (model / "hung").exists():
            progress.pulse()
        time.sleep(0.1)


class _Server(uvicorn.Server):
    """Keeps SIGTERM ignored where that is the fault asked for."""

    def __init__(self, config: uvicorn.Config, *, ignore_sigterm: bool) -> None:
        super().__init__(config)
        self._ignore = ignore_sigterm

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._ignore:
            super().handle_exit(sig, frame)


def main() -> None:
    follow_supervisor()  # as the engine does: a test that kills a server leaves nothing behind
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    args, _ = parser.parse_known_args()
    wish = args.model / "fake.json"
    start = Start(**json.loads(wish.read_text())) if wish.exists() else Start()
    for text, otherwise in start.when.items():
        if text in " ".join(sys.argv):
            start = replace(start, **otherwise)
    load(args.model, start)
    if not start.quiet:
        threading.Thread(target=pulse, args=(args.model,), daemon=True).start()
    app = FakeEngine(args.model, args.served_model_name, start).app
    keep_alive = int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))  # as vLLM reads it
    config = uvicorn.Config(
        app, uds=args.uds, log_level="warning", timeout_graceful_shutdown=1, timeout_keep_alive=keep_alive
    )
    _Server(config, ignore_sigterm=start.ignore_sigterm).run()


if __name__ == "__main__":
    main()
