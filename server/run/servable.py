"""Whether a configuration's model can be served: asks quant/verify/servable.py, for the devices configured or found."""

from pathlib import Path

from quant.errors import QuantError
from quant.formats.others import Device
from quant.verify.servable import Examination, Target, examine
from server.config.devices import V100, find_devices
from server.config.presets import Preset, find_preset, load_presets
from server.config.settings import Config, engine_is_cpu_build
from server.errors import ConfigError, ModelRefusedError, PreflightError
from server.run.engine_decisions import engine_decisions


def check(config: Config) -> Examination:
    """Examines the model for the devices that it is to be served on.

    Raises:
        ModelRefusedError: it cannot be served; says what was found and what to do, as `voltserve verify` does.
        PreflightError: the engine refuses it with these settings.
    """
    try:
        seen = examine(Path(config.model), target_of(config, find_preset(config.preset, load_presets())))
    except QuantError as error:
        raise ModelRefusedError(str(error)) from error
    if seen.refusal:
        raise ModelRefusedError(seen.refusal)
    if refusal := engine_decisions(config)[1]:
        raise PreflightError(refusal)
    return seen


def target_of(config: Config, preset: Preset) -> Target:
    """The target of a configuration: its device, and its flags about the model's files."""
    flags = config.engine
    overrides = flags.get("hf-overrides")
    named = overrides.get("architectures") if isinstance(overrides, dict) else None
    return Target(
        device=device_of(config, preset),
        quantization=str(flags.get("quantization") or ""),
        own_code=str(flags.get("model-impl", "auto")) not in ("auto", "vllm"),
        tokenizer=Path(str(flags["tokenizer"])) if "tokenizer" in flags else None,
        no_tokenizer=bool(flags.get("skip-tokenizer-init", False)),
        architectures=tuple(map(str, named)) if isinstance(named, list) else (),
    )


def device_of(config: Config, preset: Preset) -> Device:
    """The kind of device that the engine runs on: the cards found, or the preset's where the machine has none."""
    if preset.match is None:
        return "cpu"
    found = [gpu.capability for gpu in config.devices.gpus] or [preset.match.capability]
    return "volta" if config.volta == "force" or V100 in found else "gpu"


def device_here() -> Device:
    """The kind of device for an engine on this machine; V100s where no engine is installed, or the driver does not
    answer.
    """
    try:
        if engine_is_cpu_build():
            return "cpu"
        found = [gpu.capability for gpu in find_devices().gpus]
    except (ConfigError, PreflightError):
        return "volta"
    return "volta" if V100 in found or not found else "gpu"
