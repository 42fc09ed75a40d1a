"""Times `voltserve verify` on a model directory of 20 GB: headers only, and every byte with its sha256.

The directory has the shapes of a 27B model (64 layers, hidden 5120, intermediate 17408) in eight shards. Its files are
sparse, so that it needs no disk: what is timed is all of the work but the disk's.

    python scripts/verify_large.py --out docs/results/verify-20gb.json
"""

import argparse
import datetime
import json
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, FFN, LAYERS, VOCAB, SHARDS = 5120, 17408, 64, 248320, 8
LINEARS = {
    "self_attn.q_proj": (12288, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 6144),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def tensors() -> list[dict[str, tuple[str, list[int], int]]]:
    """Name to (dtype, shape, bytes) for each shard."""
    shards: list[dict[str, tuple[str, list[int], int]]] = [{} for _ in range(SHARDS)]
    for number in range(LAYERS):
        own = shards[number * SHARDS // LAYERS]
        for name, (rows, columns) in LINEARS.items():
            module = f"model.layers.{number}.{name}"
            own[f"{module}.weight_packed"] = ("U8", [rows, columns // 2], rows * columns // 2)
            own[f"{module}.weight_scale"] = ("F8_E4M3", [rows, columns // 16], rows * columns // 16)
            own[f"{module}.weight_global_scale"] = ("F32", [1], 4)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            own[f"model.layers.{number}.{norm}.weight"] = ("BF16", [HIDDEN], 2 * HIDDEN)
    for number, name in ((0, "model.embed_tokens.weight"), (SHARDS - 1, "lm_head.weight")):
        shards[number][name] = ("BF16", [VOCAB, HIDDEN], 2 * VOCAB * HIDDEN)
    return shards


def write_sparse(directory: Path) -> int:
    """The model; returns its size in bytes."""
    weight_map = {}
    total = 0
    for number, own in enumerate(tensors(), 1):
        header, end, name = {}, 0, f"model-{number:05}-of-{SHARDS:05}.safetensors"
        for tensor, (dtype, shape, size) in own.items():
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        total += 8 + len(text) + end
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    config = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "quantization_config": quantization}
    for name, content in (
        ("model.safetensors.index.json", {"weight_map": weight_map}),
        ("config.json", config),
        ("tokenizer.json", {}),
        ("tokenizer_config.json", {}),
    ):
        (directory / name).write_text(json.dumps(content))
    return total


def timed(*arguments: str) -> tuple[float, int, int]:
    """Seconds, peak memory in KiB and exit status of `voltserve` with these arguments."""
    command = [sys.executable, "-c", "from server.cli import main; main()", *arguments]
    probe = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL); "
    probe += "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", probe, *command], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    peak, code = re.findall(r"peak (\d+) (-?\d+)", done.stdout)[0]
    return seconds, int(peak), int(code)


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_sparse(Path(folder))
        headers = min(timed("verify", "--headers", folder) for _ in range(3))
        digests = "".join(f"{'0' * 64}  {path.name}\n" for path in Path(folder).glob("*.safetensors"))
        (Path(folder) / "SHA256SUMS").write_text(digests)
        full = timed("verify", folder)
    result = {
        "what": "voltserve verify on a sparse model directory, process start included; exit status 1 of "
        "the full run is for its digests, which are made up",
        "provenance": "measured",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": "python scripts/verify_large.py",
        "machine": f"{platform.machine()}, 2 cores, Python {platform.python_version()}",
        "bytes": size,
        "tensors": sum(len(own) for own in tensors()),
        "headers_seconds": round(headers[0], 2),
        "headers_peak_mib": round(headers[1] / 1024),
        "headers_exit": headers[2],
        "full_seconds": round(full[0], 1),
        "full_gb_per_second": round(size / full[0] / 1e9, 2),
        "full_peak_mib": round(full[1] / 1024),
        "full_exit": full[2],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
