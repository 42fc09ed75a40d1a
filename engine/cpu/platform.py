"""vLLM's CPU platform, which records a model's steps by default (engine/steps/recording.py).

vLLM's own default on CPUs compiles for minutes.
"""

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from engine import progress
from engine.operators import check
from engine.steps import recording

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RecordingCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM's classes are untyped
    """`_enum` stays CPU, so vLLM does here what it does on other CPUs."""

    # vLLM compiles functions beside the model, too (sampling, log probabilities). They stay eager here.
    simple_compile_backend = "eager"
    ray_device_key = "GPU"  # engine/cpu/ray.py

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing: `engine.operators` has defined what vLLM's library would."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Replaces an FP8 cache, which vLLM refuses on CPUs, by one in the activations' dtype.

        It also restores the executors that vLLM replaces by `mp`: `ray`, and `uni` where the environment of this
        process already says how many threads compute. `uni` saves each step the way to another process and back.
        """
        cache = vllm_config.cache_config
        if cache.cache_dtype.startswith("fp8"):
            reason = f"{cache.cache_dtype} is asked for, and CPUs compute attention in the activations' dtype"
            progress.decision("KV cache dtype", "the activations'", reason)
            cache.cache_dtype = "auto"
        asked = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        check.refuse(vllm_config)
        if asked == "ray":
            from engine.cpu import ray as cpu_ray

            cpu_ray.use(vllm_config)
        if asked == "uni" and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            vllm_config.parallel_config.distributed_executor_backend = "uni"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The import path of the communicator that knows whether all workers are on one machine."""
        return "engine.cpu.ray.MachineCommunicator"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Records steps unless `--enforce-eager` or a `--compilation-config` says otherwise."""
        from vllm.config import CompilationMode

        super().apply_config_platform_defaults(vllm_config)
        compilation, model = vllm_config.compilation_config, vllm_config.model_config
        if compilation.mode is not None:
            return
        compilation.mode = CompilationMode.NONE
        hybrid = model is not None and model.is_hybrid
        chosen = progress.settle(recording.choose(hybrid=hybrid, disabled=recording.disabled(), gpu=False))
        if chosen.choice == recording.RECORDED:
            recording.record(compilation)
