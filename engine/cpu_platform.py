"""vLLM's CPU platform, with a model's step recorded once and then replayed without its modules.

A step of a small model is a few hundred short operations, and Python's way through thirty layers of modules between
them takes as long as they do. Dynamo records the operations while the engine warms up; nothing is compiled, so no
compiler is needed and recording takes seconds, where vLLM's default for CPUs compiles for minutes.
"""

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from engine import progress

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STEPS = "steps of the model"


class RecordingCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM's classes are untyped
    """`_enum` stays CPU: all that vLLM does on CPUs it does here, too."""

    # Of what vLLM compiles beside the model (sampling, log probabilities): not compiled either.
    simple_compile_backend = "eager"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Has steps recorded unless `--enforce-eager` or a `--compilation-config` says otherwise."""
        from vllm.config import CompilationMode

        super().apply_config_platform_defaults(vllm_config)
        compilation, model = vllm_config.compilation_config, vllm_config.model_config
        if compilation.mode is not None:
            return
        if model is not None and model.is_hybrid:
            compilation.mode = CompilationMode.NONE
            progress.decision(STEPS, "eager", "the model has recurrent layers, whose steps are not recorded")
            return
        compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
        compilation.backend = "eager"
        progress.decision(STEPS, "recorded", "replaying operations without the model's modules is faster")
