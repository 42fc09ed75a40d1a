#!/usr/bin/env python3
"""Tokens a second on this CPU, through HTTP: ours, stock vLLM on the 16-bit model, and llama.cpp, side by side.

    .venv/bin/python -m scripts.bench_cpu docs/results/cpu-DATE.json --llama build/llama.cpp

One server is up at a time: an idle one still takes its share of cores and caches. Each is started, warmed, measured and
ended in turn, round after round, so that what else the machine does hits all alike; the ratios are of medians over all
measurements. llama.cpp is left out where no folder for it is named; in a new one it takes ten minutes to build. Beside:
the NVFP4 kernel's GB/s against the read ceiling.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
GROUP = 16
KERNEL_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 4096))
# SmolLM2-135M's layers, as engine/cpu/decoder.py has a decoding step run: all products in one call.
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 9, 3, 64
CONTEXT, PAGE = 64, 32


@dataclass
class Server:
    """One way to serve the model, and what it did: tokens a second by number of streams, one entry a round."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)  # of the request's body
    port: int = 0
    ready_s: list[float] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=lambda: {streams: [] for streams in STREAMS})

    def median(self, streams: int) -> float:
        """Tokens a second of the middle measurement."""
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
        made.append(Server(f"vLLM 0.28.0, {dtype}", command, VLLM_ENVIRONMENT, extra))
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

    vLLM sends tokens together where its API server has fallen behind; llama.cpp's server knows no usage of streams.
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
        # Looked at afterwards: what the client computes meanwhile, it takes from the server.
        completions = list(pool.map(lambda number: stream(server, number), range(first, first + streams)))
        seconds = time.monotonic() - began
    counts = [tokens_of(events) for events in completions]
    if min(counts) < TOKENS // 2:
        sys.exit(f"{server.name}: expected about {TOKENS} tokens a prompt, got {counts}")
    server.rates[streams].append(sum(counts) / seconds)


def rounded(rates: list[float]) -> list[float]:
    """To tenths."""
    return [round(rate, 1) for rate in rates]


def kernels() -> dict[str, object]:
    """GB/s of the NVFP4 product over one token, of matrices too many for the caches, and the read ceiling."""
    import torch
    import voltserve_kernels

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "read_ceiling"
        source = ROOT / "kernels" / "tools" / "read_ceiling.cpp"
        subprocess.run(["g++", "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
        output = subprocess.run([program, str(os.cpu_count())], check=True, capture_output=True, text=True).stdout
    ceiling = float(output)
    rows = []
    for n, k in KERNEL_SHAPES:
        copies = (256 << 20) // weight_bytes(n, k) + 1
        first = random_matrix(n, k)
        weights = [first, *([part.clone() for part in first] for _ in range(copies - 1))]
        x = torch.randn(1, k)

        def products(weights: list[list[Any]] = weights, x: Any = x) -> None:
            for packed, scales, factor in weights:
                torch.ops.voltserve.nvfp4_linear(x, packed, scales, factor, GROUP)

        rows.append({"n": n, "k": k, **rate(products, copies * weight_bytes(n, k), ceiling)})
    step, size = decoder_step()
    return {
        "read_ceiling_gb_per_s": ceiling,
        "instruction_set": voltserve_kernels.cpu_instruction_sets()[0],
        "m": 1,
        "nvfp4_linear": rows,
        "decoder_step": {"layers": LAYERS, "weight_bytes": size, **rate(step, size, ceiling)},
    }


def weight_bytes(n: int, k: int) -> int:
    """Of a matrix: codes and block scales."""
    return n * k // 2 + n * k // GROUP


def random_matrix(n: int, k: int) -> list[Any]:
    """A matrix as nvfp4_linear takes it: packed codes, scales, row factors."""
    import torch

    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0x30, (n, k // GROUP), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return [*torch.ops.voltserve.nvfp4_pack(codes, scales, GROUP), torch.full((n,), 0.1)]


def decoder_step() -> tuple[Callable[[], object], int]:
    """One token through all layers of SmolLM2-135M's shape, and the bytes of their weights."""
    import torch

    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((rows, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    norm, none = torch.ones(HIDDEN), torch.empty(0)
    tensors = []
    for _ in range(LAYERS):
        qkv, out, gate_up, down = (random_matrix(*shape) for shape in shapes)
        tensors += [norm, *qkv, none, none, none, *out, norm, *gate_up, *down]
    made = torch.ops.voltserve.decoder_make(tensors, norm, GROUP, HEADS, KV_HEADS, 1e-5, HEAD_DIM**-0.5)
    pages = CONTEXT // PAGE
    caches = [torch.zeros(2, pages, KV_HEADS, PAGE, HEAD_DIM) for _ in range(LAYERS)]
    position = torch.tensor([CONTEXT - 1])
    batch = (torch.arange(pages, dtype=torch.int32)[None], torch.tensor([0, 1]).int(), torch.tensor([CONTEXT]).int())
    arguments = (made, torch.randn(1, HIDDEN), position, torch.ones(CONTEXT, HEAD_DIM), caches, position, *batch)
    size = LAYERS * sum(weight_bytes(*shape) for shape in shapes)
    return lambda: torch.ops.voltserve.decoder_step(*arguments), size


def rate(work: Callable[[], object], size: int, ceiling: float) -> dict[str, float]:
    """GB/s of the fastest of some runs that read `size` bytes each."""
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    speed = size / min(seconds) / 1e9
    return {"gb_per_s": round(speed, 2), "of_ceiling": round(speed / ceiling, 3)}


def report(compared: list[Server], kernel: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """The result file's contents."""
    ours = compared[0]
    dense = [server for server in compared if server.name.startswith("vLLM")]
    peers = {"vLLM's best dtype": dense, "llama.cpp": [one for one in compared if one.name.startswith("llama")]}
    ratios = {
        f"x{streams} over {name}": round(ours.median(streams) / max(one.median(streams) for one in group), 2)
        for streams in STREAMS
        for name, group in peers.items()
        if group
    }
    return {
        "what": "SmolLM2-135M through HTTP: tokens a second by number of streams",
        "how": "one server up at a time, in turn, round after round; medians of all measurements",
        "provenance": "measured",
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "command": "scripts/bench_cpu.py " + " ".join(map(str, sys.argv[1:])),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {cpu_model()}",
        "load_average": os.getloadavg(),
        "tokens_a_stream": TOKENS,
        "rounds": arguments.rounds,
        "measurements_a_round": REPEATS,
        "ratios": ratios,
        "servers": [
            {
                "name": server.name,
                "ready_s": statistics.median(server.ready_s),
                **{f"x{streams}": round(server.median(streams), 1) for streams in STREAMS},
                "measurements": {
                    f"x{streams}": [round(rate, 1) for rate in server.rates[streams]] for streams in STREAMS
                },
            }
            for server in compared
        ],
        "kernel": kernel,
    }


def plot(result: dict[str, object]) -> str:
    """The servers' tokens a second as bars, in SVG."""
    rows = [(server["name"], streams, server[f"x{streams}"]) for streams in STREAMS for server in result["servers"]]  # type: ignore[attr-defined]
    widest = max(rate for *_, rate in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{24 * len(rows) + 40}" font-family="sans-serif">'
    ]
    lines.append(f'<text x="8" y="20" font-size="14">{result["what"]}, {result["date"]}</text>')
    for index, (name, streams, rate) in enumerate(rows):
        y, width = 36 + 24 * index, round(330 * rate / widest)
        color = "#1f6f50" if name.startswith("voltserve") else "#9aa5b1"
        lines.append(f'<text x="8" y="{y + 13}" font-size="12">{name}, ×{streams}</text>')
        lines.append(f'<rect x="220" y="{y}" width="{width}" height="16" fill="{color}"/>')
        lines.append(f'<text x="{226 + width}" y="{y + 13}" font-size="12">{rate}</text>')
    return "\n".join([*lines, "</svg>", ""])


def cpu_model() -> str:
    """As the system names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dense-dtypes", nargs="*", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's folder, made where it is not there")
    arguments = parser.parse_args()
    compared = servers(arguments)
    kernel = kernels()
    with tempfile.TemporaryDirectory() as logs:
        for number in range(arguments.rounds):
            for server in compared:
                with running(server, Path(logs)):
                    stream(server, 0)
                    for repeat in range(REPEATS):
                        for streams in STREAMS:
                            measure(server, streams, first=1000 * number + 100 * repeat + 1)
                told = {
                    streams: [round(rate, 1) for rate in rates[-REPEATS:]] for streams, rates in server.rates.items()
                }
                print(f"{server.name}: ready after {server.ready_s[-1]} s, {told} tokens a second", flush=True)
    result = report(compared, kernel, arguments)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    arguments.output.with_suffix(".svg").write_text(plot(result), encoding="utf-8")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
