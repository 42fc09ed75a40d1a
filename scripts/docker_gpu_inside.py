"""Run by docker_gpu_report.py in a container of the GPU image, as root and without a GPU; prints JSON.

`functions`: those of libcuda that the image's libraries name; of them the report makes a libcuda.so.1 that can do
nothing. `look`: with that, what a GPU engine imports is imported for real, on a platform that says it is two V100s. So
a module that docker_prune.sh should have left is missed here and not on a user's machine. And Triton compiles a kernel
for a V100.
"""

import ctypes
import importlib
import json
import mmap
import os
import re
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = Path(sysconfig.get_paths()["purelib"])
LOADS = ("vllm/*.so", "vllm/vllm_flash_attn/*.so", "torch/lib/*.so", "voltserve_kernels/*.so")

MODULES = (
    *("vllm._C", "vllm._moe_C", "vllm._custom_ops", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"),
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.attention.backends.triton_attn"),
    *(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "vllm.distributed.parallel_state",
        "vllm.model_executor.layers.fused_moe",
    ),
    *(f"vllm.model_executor.models.{name}" for name in ("llama", "qwen3", "qwen3_5")),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    *(f"vllm.model_executor.layers.quantization.{name}" for name in ("modelopt", "awq", "gptq")),
    *("engine.plugin", "engine.launcher", "engine.layers.linear", "engine.weights.loader", "voltserve_kernels"),
)


def driver_functions() -> list[str]:
    """The functions of libcuda that the libraries name: a few more than they call."""
    names: set[bytes] = set()
    for path in (path for pattern in LOADS for path in PACKAGES.glob(pattern)):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names.update(re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", content))
    return sorted(name.decode() for name in names)


def pretend_v100s() -> None:
    """Makes vLLM's CUDA platform the current one, on two devices of capability 7.0."""
    import vllm.platforms
    from vllm.platforms.cuda import NvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(7, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "Tesla V100-PCIE-16GB"

        @classmethod
        def device_count(cls) -> int:
            return 2

    vllm.platforms._current_platform = Pretended()


def imports() -> dict[str, str]:
    """For each module `imported`, or why not."""
    outcome = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
            outcome[name] = "imported"
        except Exception as error:  # whatever it is, it is the finding
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


def compilers() -> list[str]:
    """Every program in the image that compiles, assembles or links C, C++ or CUDA C++; ptxas is Triton's and stays."""
    pattern = re.compile(r"(\w+-linux-gnu-)?(gcc|g\+\+|cc|c\+\+|cc1|cc1plus|clang|tcc|ld|as|nvcc|cicc)(-[\d.]+)?")
    return [
        str(Path(folder) / name)
        for top in ("/usr", "/opt", "/bin", "/var")
        for folder, _, names in os.walk(top)
        for name in names
        if pattern.fullmatch(name) and os.access(Path(folder) / name, os.X_OK)
    ]


def triton_without_compiler() -> dict[str, str]:
    """A kernel compiled for sm_70, and how far a launch of it gets without a GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine import triton_driver

    @triton.jit  # type: ignore[untyped-decorator]
    def double(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

    source = ASTSource(double, {"x": "*fp16", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    kernel = triton.compile(source, target=GPUTarget("cuda", 70, 32))
    cuda = triton_driver.Cuda(ctypes.CDLL("libcuda.so.1"))
    try:
        triton_driver.Launcher(cuda, source, kernel.metadata)(
            1, 1, 1, 0, 1, kernel.packed_metadata, None, None, None, None, 1, 128
        )
        launched = "launched"
    except RuntimeError as error:
        launched = str(error)
    return {
        "compiler_for_triton": triton_driver.compiler(os.environ) or "none",
        "machine_code_for_sm_70": f"{len(kernel.asm['cubin'])} bytes",
        "launch_without_a_gpu": launched,
    }


def sizes() -> dict[str, int]:
    """Megabytes of each folder of site-packages (of `nvidia`: each of its own) that has more than 20."""
    folders = [path for path in (*PACKAGES.iterdir(), *(PACKAGES / "nvidia").iterdir()) if path.is_dir()]
    found = {}
    for folder in folders:
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) // 10**6
        if size > 20 and folder.name != "nvidia":
            found[str(folder.relative_to(PACKAGES))] = size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def look() -> dict[str, Any]:
    """All that is found."""
    found = {
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "voltserve", "voltserve-kernels")},
        "megabytes_by_package": sizes(),
        "compilers": compilers(),
        "triton": triton_without_compiler(),
    }
    pretend_v100s()
    return {**found, "imports": imports()}


if __name__ == "__main__":
    print("\n" + json.dumps({"functions": driver_functions, "look": look}[sys.argv[1]]()))
