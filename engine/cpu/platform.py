"""vLLM's CPU platform, with a model's steps recorded unless asked otherwise (engine/steps/recording.py).

vLLM's own default for CPUs compiles for minutes.
"""

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from engine import progress
from engine.steps import recording

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RecordingCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM's classes are untyped
    """`_enum` stays CPU: all that vLLM does on CPUs it does here, too."""

    # Of what vLLM compiles beside the model (sampling, log probabilities): not compiled either.
    simple_compile_backend = "eager"
    ray_device_key = "GPU"  # engine/cpu/ray.py

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """A cache in the activations' dtype where the checkpoint asks for FP8, which vLLM refuses on CPUs.

        vLLM puts `mp` where `ray` was asked for.
        """
        cache = vllm_config.cache_config
        if cache.cache_dtype.startswith("fp8"):
            reason = f"{cache.cache_dtype} is asked for, and CPUs compute attention in the activations' dtype"
            progress.decision("KV cache dtype", "the activations'", reason)
            cache.cache_dtype = "auto"
        asked = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if asked == "ray":
            from engine.cpu import ray as cpu_ray

            cpu_ray.use(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """What tells workers of one machine from those of several."""
        return "engine.cpu.ray.MachineCommunicator"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Has steps recorded unless `--enforce-eager` or a `--compilation-config` says otherwise."""
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
