"""Whether engine/triton_driver.py launches Triton's kernels as Triton's own driver does."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from engine import triton_driver

LAUNCHES = 2000


@triton.jit  # type: ignore[untyped-decorator]
def _store_scalars(ints, floats, nothing, i, long, big, one, half: "fp16", brain: "bf16", single, double: "fp64", yes):  # type: ignore[no-untyped-def, name-defined]  # noqa: F821
    tl.store(ints + 0, i.to(tl.int64))
    tl.store(ints + 1, long.to(tl.int64))
    tl.store(ints + 2, big.to(tl.int64))
    tl.store(ints + 3, one)
    tl.store(ints + 4, tl.where(yes, 1, 0))
    tl.store(ints + 5, nothing is None)
    tl.store(floats + 0, half.to(tl.float64))
    tl.store(floats + 1, brain.to(tl.float64))
    tl.store(floats + 2, single.to(tl.float64))
    tl.store(floats + 3, double)


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _add_pair(pair, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pair[0] + at, at < n) * pair[1], at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, out, K: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column, k = tl.arange(0, 128)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    result = tl.dot(tl.load(a + row * K + k[None, :]), tl.load(b + k[:, None] * N + column))
    tl.store(out + row * N + column, result)


def _scalars() -> bool:
    ints, floats = torch.zeros(6, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.float64, device="cuda")
    _store_scalars[(1,)](ints, floats, None, -7, 2**40, 2**63 - 1, 1, 0.1, 0.1, 0.1, 0.1, True)
    rounded = [torch.tensor(0.1, dtype=dtype).double().item() for dtype in (torch.float16, torch.float32)]
    truncated = torch.tensor([0.1]).view(torch.int32).bitwise_and(-65536).view(torch.float32).double().item()
    expected = [rounded[0], truncated, rounded[1], 0.1]
    return ints.tolist() == [-7, 2**40, 2**63 - 1, 1, 1, 1] and floats.tolist() == expected


def _sums(n: int = 5000) -> bool:
    x, y, out = torch.randn(n, device="cuda"), torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    _add[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    return torch.equal(out, x + y)


def _of_pinned_memory() -> bool:
    x, out = torch.randn(1000).pin_memory(), torch.zeros(1000, device="cuda")
    _add[(1,)](x, x, out, 1000, BLOCK=1024)
    return torch.equal(out.cpu(), x + x)


def _of_tuples() -> bool:
    x, out = torch.randn(100, device="cuda"), torch.zeros(100, device="cuda")
    _add_pair[(1,)]((x, 3), out, 100, BLOCK=128)
    return torch.equal(out, x * 3)


def _much_shared_memory() -> bool:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in ((128, 256), (256, 128)))
    out = torch.empty(128, 128, device="cuda")
    kernel = _product[(1,)](a, b, out, K=256, N=128)
    return kernel.metadata.shared > 48 * 1024 and torch.allclose(out, a.float() @ b.float(), rtol=1e-3, atol=1e-2)


def _in_another_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_sums(3000)))
    thread.start()
    thread.join()
    return found == [True]


def _in_a_graph() -> bool:
    x, y, out = (torch.randn(1000, device="cuda") for _ in range(3))
    _add[(1,)](x, y, out, 1000, BLOCK=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _add[(1,)](x, y, out, 1000, BLOCK=1024)
    x.fill_(2.0)
    graph.replay()
    return torch.equal(out, x + y)


def _host_memory_is_refused() -> bool:
    try:
        _add[(1,)](torch.randn(10), torch.randn(10), torch.empty(10, device="cuda"), 10, BLOCK=1024)
    except ValueError as error:
        return "cannot be accessed" in str(error)
    return False


def microseconds() -> float:
    """Of one launch, without waiting for the GPU; the best of five rounds."""
    x, y, out = (torch.randn(1000, device="cuda") for _ in range(3))
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            _add[(1,)](x, y, out, 1000, BLOCK=1024)
        rounds.append(time.perf_counter() - began)
    return round(1e6 * min(rounds[1:]) / LAUNCHES, 2)


CASES = (
    _scalars,
    _sums,
    _of_pinned_memory,
    _of_tuples,
    _much_shared_memory,
    _in_another_thread,
    _in_a_graph,
    _host_memory_is_refused,
)


def trial(driver: str) -> dict[str, Any]:
    """All cases with one driver, in this process."""
    if driver == "ours":
        if found := triton_driver.compiler(os.environ):
            sys.exit(f"expected no C compiler in PATH, found {found}")
        triton_driver.activate()
    began = time.perf_counter()
    _sums()
    first = time.perf_counter() - began
    outcome = {}
    for case in CASES:
        try:
            outcome[case.__name__.strip("_")] = "right" if case() else "wrong"
        except Exception as error:  # whatever it is, it is the finding
            outcome[case.__name__.strip("_")] = f"{type(error).__name__}: {error}"
    return {"first_launch_seconds": round(first, 3), "microseconds_a_launch": microseconds(), "cases": outcome}


def _in_a_process(driver: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"TRITON_CACHE_DIR": cache}
        if driver == "ours":
            environment["PATH"] = cache
        command = [sys.executable, __file__, "--driver", driver]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        sources = sorted({path.name for path in Path(cache).rglob("*.so")})
    if done.returncode:
        return {"failed": done.stderr[-3000:]}
    return {**json.loads(done.stdout.splitlines()[-1]), "compiled_from_c": sources}
