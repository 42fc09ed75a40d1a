"""Where a decoding step's attention spends its time: every warp records when it reaches certain points of the kernel.

    python -m kernels.tools.attention_clocks --build build/cuda-80-90
    python -m kernels.tools.attention_clocks --library build/cuda-80-90/clocks/libvoltserve_cuda.so --output NAME.json

--build needs nvcc. It inserts POINTS into a copy of kernels/cuda/attention/decode.cuh, compiles it as
scripts/build_cuda.sh does, and links it with that folder's other objects. What is shipped has no such points. On the
GPU each point reads the timer that all multiprocessors share. On an H200 it ticks every 32 ns. A read waits for the
value that its point is about, and so takes some time itself.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kernels.tools.native import ROOT
from kernels.tools.native_attention import AttentionLibrary

# (point, text of attention/decode.cuh with @ where the read goes, 32 bits that must be known by then)
POINTS = (
    ("start", "@  const Splits splits(args, kShape.tile(), gridDim.x);\n", "0u"),
    ("its split is known", "@  Products products(threadIdx.x % 32);\n", "work.last_tile"),
    ("the block table is there", "@  reader.load_keys(work.first_tile, k);\n", "reader.near"),
    (
        "the first keys are there",
        "@    reader.load_keys(next_tile, k);\n",
        "tile == work.first_tile ? __float_as_uint(score[0][0]) : kNoPoint",
    ),
    ("the split is added up", "@  softmax.finish(products, ends);\n", "__float_as_uint(products.sum[0][0][0])"),
    ("its sums are left", "@  if (count == 1) return;\n", "0u"),
    ("its block is counted", "@    if (!last && members > 1) return;\n", "last"),
    ("the request's result is written", "    owner.leave(value, end, width * kRadix >= work.count);\n@", "0u"),
)
CODE = """
__device__ unsigned long long *clocks_to;
constexpr unsigned kNoPoint = 0x7FC12345u;
__device__ inline void read_clock(int point, unsigned value) {
  if (threadIdx.x % 32 != 0 || value == kNoPoint) return;  // compared, so that the read waits for it
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  clocks_to[(block * (blockDim.x / 32) + threadIdx.x / 32) * POINTS + point] = now;
}
extern "C" int voltserve_clocks(void *to) { return cudaMemcpyToSymbol(clocks_to, &to, sizeof to); }
"""
# (model and rank, query heads, key heads, head size, positions of each request)
CASES = (
    ("Qwen3-32B TP2", 32, 4, 128, [8192] * 8),
    ("Qwen3-32B TP2", 32, 4, 128, [8192]),
    ("Qwen3.8-27B TP2", 12, 2, 256, [8192] * 8),
)
BATCHES = 3  # one after another, so that none is in the L2
MOST_WARPS = 1 << 16


def with_points(source: str) -> str:
    """attention/decode.cuh's text with POINTS in it. Raises ValueError naming a point without one place."""
    for index, (name, place, value) in enumerate(POINTS):
        text = place.replace("@", "")
        if source.count(text) != 1:
            raise ValueError(
                f"{name}: expected {text!r} once in attention/decode.cuh, found it {source.count(text)} times"
            )
        source = source.replace(text, place.replace("@", f"read_clock({index}, {value});\n"))
    opening = "namespace voltserve {\n"
    return source.replace(opening, opening + CODE.replace("POINTS", str(len(POINTS))), 1)


def build(folder: Path) -> Path:
    """The library of `folder`'s objects with POINTS in its decoding kernel, in `folder`/clocks."""
    fetched = subprocess.run([ROOT / "scripts" / "fetch_nvcc.sh"], check=True, capture_output=True, text=True)
    cuda_home = Path(fetched.stdout.strip())
    out, sources, room = folder / "clocks", ROOT / "kernels", Path("cuda/attention")
    (out / room).mkdir(parents=True, exist_ok=True)
    (out / room / "decode.cuh").write_text(with_points((sources / room / "decode.cuh").read_text()))
    compiled, library = out / "decode.o", out / "libvoltserve_cuda.so"
    first, last = folder.name.split("-")[1:]
    code = f"arch=compute_{first},code=sm_{last}"
    command: list[str | Path] = [cuda_home / "bin" / "nvcc", "-gencode", code, "-O3", "-std=c++17"]
    # The copy's folder comes first, so its header is found instead of the kernels' own.
    found_in: list[str | Path] = ["-I", out, "-I", sources]
    source = sources / room / "decode.cu"
    subprocess.run([*command, "-Xcompiler", "-fPIC", *found_in, "-c", source, "-o", compiled], check=True)
    replaced = folder / "attention" / "decode.o"
    others = [one for one in folder.glob("*/*.o") if one not in (replaced, compiled)]
    linked: list[str | Path] = [
        "g++",
        "-shared",
        compiled,
        *others,
        "-o",
        library,
        f"-L{cuda_home}/lib64",
        "-lcudart",
        "-Wl,-rpath,$ORIGIN/..",
    ]
    subprocess.run(linked, check=True)
    return library


def summary(clocks: Any) -> dict[str, dict[str, float]]:
    """By point, µs since the first warp's start; clocks [warps, points] in ns, 0 where a warp never arrived."""
    since = (clocks - clocks[clocks[:, 0] != 0, 0].min()).double() / 1e3
    found = {}
    for index, (name, *_) in enumerate(POINTS):
        reached = since[clocks[:, index] != 0, index]
        if len(reached):
            moments = {
                key: round(float(reached.quantile(share)), 2)
                for key, share in (("first", 0.0), ("median", 0.5), ("last", 1.0))
            }
            found[name] = {"warps": len(reached)} | moments
    return found


def measure(native: AttentionLibrary, clocks_to: Any, heads: tuple[int, int, int], positions: list[int]) -> Any:
    """The clocks [warps, points] of one step of requests with so many positions each; no cache is in the L2."""
    import torch

    from kernels.tools.attention_reference import random_batch

    generator = torch.Generator("cuda").manual_seed(3)
    launches = []
    for _ in range(BATCHES):
        b = random_batch([(1, total) for total in positions], *heads, 16, generator)
        known = (b.block_table, b.query_start, b.seq_lens)
        launches.append(
            native.attention(b.q, b.k_cache, b.v_cache, *known, 1, 1, torch.empty_like(b.q), heads[2] ** -0.5)
        )
    clocks = torch.zeros(MOST_WARPS, len(POINTS), dtype=torch.int64, device="cuda")
    if clocks_to(ctypes.c_void_p(clocks.data_ptr())):
        raise RuntimeError("voltserve_clocks: expected the address of the clocks to be taken, got a CUDA error")
    for launch in (*launches, *launches[1:]):
        launch()
    clocks.zero_()
    launches[0]()
    torch.cuda.synchronize()
    return clocks.cpu()


def main() -> None:
    """Builds, or measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="what scripts/build_cuda.sh FROM TO made")
    parser.add_argument("--library", type=Path, help="what --build printed")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.build:
        print(build(arguments.build))
    if not arguments.library:
        return
    import torch

    native = AttentionLibrary(arguments.library)
    clocks_to = ctypes.CDLL(str(arguments.library)).voltserve_clocks
    rows = []
    for model, q_heads, kv_heads, head_dim, positions in CASES:
        points = summary(measure(native, clocks_to, (q_heads, kv_heads, head_dim), positions))
        rows.append({"model": model, "requests": len(positions), "positions": positions[0], "points_us": points})
        print(
            model,
            f"{len(positions)} x {positions[0]}",
            *(f"\n  {name}: {of}" for name, of in points.items()),
            flush=True,
        )
    if arguments.output:
        result = {
            "what": "when warps of decoding attention come to points of the kernel, in us since the first one's start",
            "provenance": "measured",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name(),
            "command": " ".join(sys.argv),
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
