"""Records what the GPU image is: size, layers, what fills it, V100 machine code, what a machine without a GPU is told.

    scripts/docker_build.sh gpu
    .venv/bin/python scripts/docker_gpu_report.py docs/results/docker-2026-11-30.json

Needs no GPU, but gcc. cuobjdump is that of scripts/fetch_nvcc.sh.
"""

import argparse
import collections
import datetime
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INSIDE = ROOT / "scripts/docker_gpu_inside.py"
LIBCUDA = "libcuda.so.1"
SITE_PACKAGES = "/opt/voltserve/lib/python{}/site-packages"
# What runs on the GPU when voltserve serves; each must hold machine code for 7.0.
LIBRARIES = (
    "voltserve_kernels/ops.so",
    "vllm/_C.abi3.so",
    "vllm/_moe_C.abi3.so",
    "torch/lib/libtorch_cuda.so",
    "nvidia/cublas/lib/libcublas.so.12",
    "nvidia/cublas/lib/libcublasLt.so.12",
    "nvidia/nccl/lib/libnccl.so.2",
)


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A finished command. Exits with its message where it fails and `check` is set."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def look_inside(image: str) -> dict[str, Any]:
    """What INSIDE finds in the image, with a libcuda whose functions all return CUDA_ERROR_NO_DEVICE, 100."""

    def inside(what: str, *mounts: str) -> Any:
        volumes = [part for mount in (f"{INSIDE}:/inside.py:ro", *mounts) for part in ("--volume", mount)]
        command = ["docker", "run", "--rm", "--user", "root", "--env", "HOME=/tmp", *volumes, "--entrypoint", "python"]
        return json.loads(run(*command, image, "/inside.py", what).stdout.splitlines()[-1])

    functions = inside("functions")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "libcuda.c", Path(folder) / LIBCUDA
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions), encoding="ascii")
        run("gcc", "-w", "-fno-builtin", "-shared", f"-Wl,-soname,{LIBCUDA}", "-o", str(library), str(source))
        found: dict[str, Any] = inside("look", f"{library}:/usr/lib/x86_64-linux-gnu/{LIBCUDA}:ro")
    return {**found, "libcuda_stub_functions": len(functions)}


def machine_code(cuobjdump: Path, library: Path) -> dict[str, dict[str, int]]:
    """How many pieces of machine code and of PTX a library has for each architecture."""
    counts = {}
    for kind, option in (("machine code", "--list-elf"), ("PTX", "--list-ptx")):
        listing = run(str(cuobjdump), option, str(library), check=False).stdout  # it fails where there is none
        counts[kind] = dict(sorted(collections.Counter(re.findall(r"\.(sm_\d+a?)\.(?:cubin|ptx)", listing)).items()))
    return counts


def gpu_code(image: str, python: str) -> dict[str, dict[str, dict[str, int]]]:
    """The machine code of LIBRARIES, as they lie in the image."""
    cuobjdump = Path(run(str(ROOT / "scripts/fetch_nvcc.sh")).stdout.strip()) / "bin/cuobjdump"
    container = run("docker", "create", image).stdout.strip()
    found = {}
    try:
        for library in LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / Path(library).name
                run("docker", "cp", "-L", f"{container}:{SITE_PACKAGES.format(python)}/{library}", str(copy))
                found[library] = machine_code(cuobjdump, copy)
    finally:
        run("docker", "rm", container)
    return found


def main() -> None:
    """Writes the report; exits with 1 where something in it is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--image", help="the image; by default the tag that docker_build.sh gives")
    arguments = parser.parse_args()
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    image = arguments.image or f"voltserve:{version[1] if version else ''}-vllm0.28.0-cu128"

    found = json.loads(run("docker", "image", "inspect", image).stdout)[0]
    history = run("docker", "history", "--no-trunc", "--format", "{{json .}}", image).stdout.splitlines()
    layers = [(entry["Size"], entry["CreatedBy"]) for entry in map(json.loads, history)]
    inside = look_inside(image)
    code = gpu_code(image, ".".join(inside["python"].split(".")[:2]))
    refused = run("docker", "run", "--rm", image, "--model", "/models/quasar-nvfp4", check=False)
    report: dict[str, Any] = {
        "command": "scripts/docker_build.sh gpu; .venv/bin/python scripts/docker_gpu_report.py FILE",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "provenance": "measured; built and inspected on a machine without a GPU, never run on a V100",
        "image": image,
        "labels": found["Config"]["Labels"],
        "engine": run("docker", "version", "--format", "{{.Server.Version}}").stdout.strip(),
        "bytes": found["Size"],
        "layers": [{"size": size, "created_by": text[:200]} for size, text in layers if size != "0B"],
        "gpu_code": code,
        "without_a_gpu": {"exit_code": refused.returncode, "stderr": refused.stderr.strip()},
        **inside,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    problems = [f"a compiler is left: {path}" for path in inside["compilers"]]
    if "cuCtxGetCurrent" not in inside["triton"]["launch_without_a_gpu"]:
        problems.append(f"Triton without a compiler: {inside['triton']}")
    problems += [f"{name}: {text}" for name, text in report["imports"].items() if text != "imported"]
    problems += [f"{name} has no sm_70" for name, kinds in code.items() if "sm_70" not in kinds["machine code"]]
    if refused.returncode != 2 or "--gpus all" not in refused.stderr:
        problems.append(f"without a GPU: exit code {refused.returncode}: {refused.stderr}")
    print(f"{image}: {found['Size'] / 1e9:.2f} GB; {arguments.output}")
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
