"""Makes build/gpu_e2e/: what a bare GPU machine with Python 3.12 and its own torch needs to run the overlay end to end.

.venv/bin/python -m scripts.gpu_e2e.pack [--requirements FILE] [--model models/smollm2-nvfp4]

site.tar.xz      vLLM's Python files, wheels of --requirements, and the overlay's entry points
kernels.tar.xz   voltserve_kernels of build/wheels with libcudart, as `make kernels-cuda` left them
model.00 …       the model as tar.xz in parts of 54 MiB, its Q8_0 embedding as it was in the GGUF
questions.json, tokenizer/    what answers.py asks, and the model's tokenizer for random models
"""

import argparse
import importlib.metadata
import importlib.util
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trials.answers import make_questions

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu_e2e"
PART_BYTES = 54 << 20
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 28, 31, 34, 35)),
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
)
# What no trial reads or imports.
LEFT_OUT = (
    *("pycountry/locales", "pycountry/tests", "mistral_common/data", "numpy", "numpy.libs"),
    *("outlines_core", "lm_format_enforcer", "supervisor", "depyf", "astor", "xgrammar/lib"),
)
EMBEDDING = "model.embed_tokens.weight"
Q8_BLOCK = 32


def main() -> None:
    """Makes what is missing; delete a file to make it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requirements", type=Path, help="pinned packages that the machine lacks; for site.tar.xz")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-nvfp4")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "site.tar.xz").exists():
        with tempfile.TemporaryDirectory() as folder:
            lay_out_site(Path(folder), arguments.requirements)
            archive(Path(folder), OUT / "site.tar.xz")
    with tempfile.TemporaryDirectory() as folder:
        lay_out_kernels(Path(folder))
        archive(Path(folder), OUT / "kernels.tar.xz")
    if not (OUT / "model.00").exists():
        with tempfile.TemporaryDirectory() as folder:
            lay_out_model(arguments.model, Path(folder))
            whole = OUT / "model.tar.xz"
            archive(Path(folder), whole)
            data = whole.read_bytes()
            whole.unlink()
        for index, start in enumerate(range(0, len(data), PART_BYTES)):
            (OUT / f"model.{index:02}").write_bytes(data[start : start + PART_BYTES])
    (OUT / "tokenizer").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(arguments.model / name, OUT / "tokenizer")
    (OUT / "questions.json").write_text(json.dumps(make_questions(arguments.model)))
    for path in sorted(path for path in OUT.iterdir() if path.is_file()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.relative_to(ROOT)}")


def lay_out_site(folder: Path, requirements: Path | None) -> None:
    """A site-packages folder for Python 3.12."""
    if requirements is not None:
        with tempfile.TemporaryDirectory() as wheels:
            options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
            options += [word for name in PLATFORMS for word in ("--platform", name)]
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                *options,
                "-d",
                wheels,
                "-r",
                str(requirements),
            ]
            subprocess.run(command, check=True)
            for wheel in Path(wheels).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(folder)  # noqa: S202 - from the index, by pinned version
        for name in LEFT_OUT:
            shutil.rmtree(folder / name, ignore_errors=True)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm: expected it to be installed, found none; run `make setup`")
    vllm = folder / "vllm"
    shutil.copytree(Path(spec.origin).parent, vllm, ignore=shutil.ignore_patterns("*.so", "__pycache__", "benchmarks"))
    version = importlib.metadata.version("vllm").partition("+")[0]
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    overlay = folder / "voltserve-0.1.0.dist-info"
    overlay.mkdir()
    (overlay / "METADATA").write_text("Metadata-Version: 2.1\nName: voltserve\nVersion: 0.1.0\n")
    (overlay / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nvoltserve = engine.plugin:platform\n"
        "[vllm.general_plugins]\nvoltserve = engine.plugin:register\n"
    )


def lay_out_kernels(folder: Path) -> None:
    """voltserve_kernels, the CUDA 12 runtime they are linked with, and the yardsticks' library."""
    (wheel,) = (ROOT / "build" / "wheels").glob("voltserve_kernels-*.whl")
    zipfile.ZipFile(wheel).extractall(folder)  # noqa: S202 - our own
    for name in ("libcudart.so.12", "libvoltserve_cuda.so"):
        shutil.copy(ROOT / "build" / "cuda" / name, folder)


def lay_out_model(model: Path, folder: Path) -> None:
    """The model with its embedding as int8 codes and one float16 scale for each 32, from which it is exactly restored.

    Raises SystemExit where the embedding is not what a Q8_0 GGUF dequantizes to.
    """
    tensors = load_file(model / "model.safetensors")
    embedding = tensors.pop(EMBEDDING)
    blocks = embedding.reshape(-1, Q8_BLOCK)
    scale = (blocks.float().abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks.float() / scale.float().clamp_min(torch.finfo(torch.float16).tiny)).round()
    if not torch.equal((codes * scale.float()).half(), blocks):
        raise SystemExit(f"{model}: {EMBEDDING}: expected values of a Q8_0 GGUF, got others")
    tensors["embedding.codes"] = codes.to(torch.int8).reshape(embedding.shape)
    tensors["embedding.scale"] = scale
    save_file(tensors, folder / "packed.safetensors")
    for path in model.iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder)


def archive(folder: Path, target: Path) -> None:
    """All of a folder as tar.xz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    target.write_bytes(lzma.compress(buffer.getvalue(), preset=6))


if __name__ == "__main__":
    main()
