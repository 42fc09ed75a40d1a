"""Entry point of vLLM's `vllm.general_plugins`: registers what the overlay adds. vLLM calls it in every process."""

from functools import cache


@cache
def register() -> None:
    """Registers the quantization method, the load format, CPU layers and the patches; a second call does nothing.

    Raises:
        PatchMismatchError: something we replace is not what it was when the patch was written.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform

    from engine import cpu_attention, cpu_layers, gdn, patches, process
    from engine.loader import LOAD_FORMAT, ReportingLoader
    from engine.quantization import NAME, QuasarNvfp4Config

    process.follow_launcher()
    patches.apply()
    if current_platform.device_type == "cpu":
        cpu_layers.register()
        cpu_attention.register()
    gdn.register()
    register_quantization_config(NAME)(QuasarNvfp4Config)
    register_model_loader(LOAD_FORMAT)(ReportingLoader)
