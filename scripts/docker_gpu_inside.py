"""Run by docker_gpu_report.py in a container of the GPU image, as root and without a GPU; prints one JSON object.

What a GPU engine imports is imported for real, against a libcuda.so.1 that has every symbol asked for and can do
nothing, on a platform that says it is two V100s. So a module that docker_prune.sh should have left is missed here and
not on a user's machine. Then what Triton compiles with the C compiler at run time is compiled: its driver module and
one launcher.
"""

import importlib
import json
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["purelib"])
STUB = Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
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
    *("engine.plugin", "engine.launcher", "engine.linear", "engine.loader", "voltserve_kernels"),
)


def make_libcuda() -> int:
    """Writes STUB; returns the number of its functions. Each returns CUDA_ERROR_NO_DEVICE, 100."""
    libraries = [str(path) for pattern in LOADS for path in PACKAGES.glob(pattern)]
    undefined = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = set(re.findall(r" U (cu[A-Z]\w+)", undefined.stdout))
    triton_driver = (PACKAGES / "triton/backends/nvidia/driver.c").read_text(encoding="utf-8")
    names |= set(re.findall(r"\b(cu[A-Z]\w+)\(", triton_driver))
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
    command = ["gcc", "-w", "-fno-builtin", "-shared", f"-Wl,-soname,{STUB.name}", "-o", str(STUB), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    subprocess.run(["/sbin/ldconfig"], check=True)
    return len(names)


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


def triton_compiles() -> dict[str, str]:
    """What Triton compiles in C at run time, compiled and loaded."""
    from triton.backends.nvidia import driver

    signature = {0: "*fp16", 1: "i32", 2: "fp32"}
    launcher = driver.compile_module_from_src(
        src=driver.make_launcher({}, signature, None),
        name="__triton_launcher",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
    return {"driver": str(driver.CudaUtils().load_binary), "launcher": str(launcher.launch)}


def sizes() -> dict[str, int]:
    """Megabytes of each folder of site-packages (of `nvidia`: each of its own) that has more than 20."""
    folders = [path for path in (*PACKAGES.iterdir(), *(PACKAGES / "nvidia").iterdir()) if path.is_dir()]
    found = {}
    for folder in folders:
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) // 10**6
        if size > 20 and folder.name != "nvidia":
            found[str(folder.relative_to(PACKAGES))] = size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    report = {
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "voltserve", "voltserve-kernels")},
        "megabytes_by_package": sizes(),
        "libcuda_stub_functions": make_libcuda(),
        "triton_compiles": triton_compiles(),
    }
    pretend_v100s()
    report["imports"] = imports()
    print("\n" + json.dumps(report))
