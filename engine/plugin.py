"""vLLM's entry points: `platform` (`vllm.platform_plugins`) and `register` (`vllm.general_plugins`).

vLLM calls both in every process of the engine.
"""

import os
from functools import cache

from engine import environment, gpus, progress, volta

# vLLM's settings, unless the user's environment has others.
DEFAULTS = {
    # Its second runner launches many small Triton kernels, which no V100 has run. Our patches are of the first.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # FlashInfer is for compute capability 7.5 and newer, and not installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Names of layers stay strings in recorded steps, as they are with torch 2.10. Later releases make objects of them.
    "VLLM_USE_LAYERNAME": "0",
    # Graphs fit beside the share that --gpu-memory-utilization gives the engine, so the cache keeps what the plan says.
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
}
PLATFORMS = {"Volta": "engine.platform.VoltaPlatform", "CPU": "engine.cpu.platform.RecordingCpuPlatform"}


def platform() -> str:
    """The import path of the overlay's platform, for V100s or for CPUs.

    vLLM swallows exceptions raised here, so `register` raises a refusal. It asks before it imports its own libraries.
    """
    from engine.operators import installation

    installation.install()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    return PLATFORMS[_chosen_platform().choice]


def _chosen_platform() -> volta.Choice:
    forced = gpus.forced(os.environ)
    if not forced and not gpus.kernels_are_for_gpus():
        return volta.Choice("platform", "CPU", "the installed kernels are for CPUs only")
    return volta.choose_platform(gpus.visible(), forced=forced)


@cache
def register() -> None:
    """Registers quantization, load format, layers, patches and Triton's driver. A second call does nothing.

    Raises:
        PatchMismatchError: code that we replace differs from the code that the patch was written for.
        ValueError: V100s and other GPUs are visible together, or VOLTSERVE_FORCE_VOLTA is malformed.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform

    from engine import faults, patches, process, triton_driver
    from engine.layers import norms
    from engine.layers.quantization import NAME, QuasarNvfp4Config
    from engine.weights.loader import LOAD_FORMAT, ReportingLoader

    process.follow_launcher()
    faults.listen()
    patches.apply(forced=gpus.forced(os.environ), over_ray=environment.OVER_RAY in os.environ)
    progress.settle(_chosen_platform())
    if current_platform.device_type == "cpu":
        from engine.cpu import attention as cpu_attention
        from engine.cpu import layers as cpu_layers
        from engine.layers import experts, gdn

        cpu_layers.register()
        cpu_attention.register()
        experts.register()
        gdn.register()
    elif not current_platform.has_device_capability(75):
        compiler = triton_driver.compiler(os.environ)
        progress.settle(volta.choose_launchers(compiler))
        if not compiler:
            triton_driver.activate()
    norms.register()
    register_quantization_config(NAME)(QuasarNvfp4Config)
    register_model_loader(LOAD_FORMAT)(ReportingLoader)
