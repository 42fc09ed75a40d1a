"""Servers on this CPU, started, measured and ended in turn: ours, stock vLLM, llama.cpp.

A measurement is HTTP: all tokens of some streams over the time until the last stream has ended.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from quant.models import fetch_gguf

ROOT = Path(__file__).parents[1]
PROMPT = "Write a long story about the voyage of ship number {number}, with every detail of its journey."
TOKENS = 64
STREAMS = (1, 8)
REPEATS = 2  # measurements of each number of streams a start
READY_LIMIT_S = 300
LLAMA = "llama-cpp-python[server]==0.3.36"
CHAT = "/v1/chat/completions"  # completions without a chat's template end at once on llama.cpp
# Of requests to vLLM's API, ours or stock.
OF_VLLM: dict[str, object] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
# What the preset cpu-smoke gives our engine, for stock vLLM as well.
VLLM_ENVIRONMENT = {
    "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "KMP_BLOCKTIME": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # stock: none of ours
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Server:
    """One way to serve the model, and what it did: tokens per second by number of streams, one entry per round."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)  # of the request's body
    port: int = 0
    ready_s: list[float] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=lambda: {streams: [] for streams in STREAMS})

    def median(self, streams: int) -> float:
        """Tokens per second of the middle measurement."""
        return statistics.median(self.rates[streams])


def servers(arguments: argparse.Namespace) -> list[Server]:
    """Those to compare. `{port}` stands for the port."""
    made = [
        Server(
            "voltserve, NVFP4",
            [f"{sys.prefix}/bin/voltserve", "serve", "--model", "models/smollm2-nvfp4", "--port", "{port}"],
            extra={**OF_VLLM, "model": "models/smollm2-nvfp4"},
        )
    ]
    for dtype in arguments.dense_dtypes:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "models/smollm2"]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--distributed-executor-backend", "uni"]
        extra = {**OF_VLLM, "model": "models/smollm2"}
        made.append(Server(f"vLLM {version('vllm')}, {dtype}", command, VLLM_ENVIRONMENT, extra))
    if arguments.llama:
        command = [*llama(arguments.llama), "--host", "127.0.0.1", "--port", "{port}", "--n_ctx", "2048"]
        command += ["--n_threads", str(os.cpu_count()), "--n_threads_batch", str(os.cpu_count())]
        made.append(Server("llama.cpp, Q4_1", [*command, "--interrupt_requests", "false"]))
    return made


def llama(folder: Path) -> list[str]:
    """The command of llama.cpp's server with its model, both in `folder`, where they are made if they are not there."""
    python, gguf = folder.absolute() / "venv" / "bin" / "python", folder.absolute() / "smollm2.gguf"
    if not python.exists():
        uv = f"{sys.prefix}/bin/uv"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, LLAMA], check=True)
    if not gguf.exists():
        fetch_gguf("smollm2", gguf)
    return [str(python), "-m", "llama_cpp.server", "--model", str(gguf)]


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Iterator[None]:
    """Starts the server and waits until it has completed a prompt; ends it with all its processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        server.port = probe.getsockname()[1]
    command = [part.format(port=server.port) for part in server.command]
    log_path = logs / f"{server.name.replace(' ', '-')}.log"
    began = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | server.environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not answers(server):
                if process.poll() is not None or time.monotonic() - began > READY_LIMIT_S:
                    sys.exit(f"{server.name} did not come up:\n{log_path.read_text(errors='replace')[-3000:]}")
                time.sleep(0.2)
            server.ready_s.append(round(time.monotonic() - began, 1))
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(server: Server) -> bool:
    """Whether the server completes a prompt by now."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = {**request("Hello", 4), "stream": True, **server.extra}
        return post(server, body)[0] == 200
    return False


def request(prompt: str, tokens: int) -> dict[str, object]:
    """The body that all servers understand."""
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}


def post(server: Server, body: dict[str, object]) -> tuple[int, bytes]:
    """Status and body of a chat's completion, once it has come to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()


def stream(server: Server, number: int) -> bytes:
    """The events of one streamed completion."""
    body = {**request(PROMPT.format(number=number), TOKENS), "stream": True, **server.extra}
    status, events = post(server, body)
    if status != 200:
        sys.exit(f"{server.name}: expected status 200, got {status}: {events[:500]!r}")
    return events


def tokens_of(events: bytes) -> int:
    """Tokens of a streamed completion: what its usage says, or else its events with text, of one token each.

    vLLM sends tokens together where its API server has fallen behind; llama.cpp's server reports no usage of streams.
    """
    tokens = 0
    for line in events.splitlines():
        if line.startswith(b"data: {"):
            data = json.loads(line.removeprefix(b"data: "))
            if usage := data.get("usage"):
                return int(usage["completion_tokens"])
            choices = data.get("choices")
            tokens += bool(choices and choices[0]["delta"].get("content"))
    return tokens


def measure(server: Server, streams: int, first: int) -> None:
    """Adds one round: all tokens of the streams over the time until the last has ended, prompts included."""
    with ThreadPoolExecutor(streams) as pool:
        began = time.monotonic()
        # Parsed afterwards: computing during the streams would take the server's time.
        completions = list(pool.map(lambda number: stream(server, number), range(first, first + streams)))
        seconds = time.monotonic() - began
    counts = [tokens_of(events) for events in completions]
    if min(counts) < TOKENS // 2:
        sys.exit(f"{server.name}: expected about {TOKENS} tokens per prompt, got {counts}")
    server.rates[streams].append(sum(counts) / seconds)
