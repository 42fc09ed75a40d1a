"""The choice of a preset for the GPUs that this machine has. Pure functions, each with its reason."""

from collections.abc import Mapping

from server.config.devices import Devices
from server.config.presets import Preset
from server.decisions import UNUSED_CARDS, Decision
from server.errors import ConfigError, PreflightError


def unused_cards(presets: Mapping[str, Preset], devices: Devices, *, cpu_engine: bool) -> list[Decision]:
    """A decision to report where the engine is the CPU build, but the CUDA build would use the machine's cards."""
    if not cpu_engine or not _capabilities(presets).intersection(gpu.capability for gpu in devices.gpus):
        return []
    remedy = "`make setup ENGINE=gpu` installs the GPU engine"
    return [Decision(*UNUSED_CARDS, f"{devices} stays unused, which would serve many times faster; {remedy}")]


def _capabilities(presets: Mapping[str, Preset]) -> set[str]:
    """The compute capabilities that presets are for."""
    return {preset.match.capability for preset in presets.values() if preset.match is not None}


def select_preset(presets: Mapping[str, Preset], devices: Devices, *, cpu_engine: bool) -> tuple[Preset, Decision]:
    """The preset for these devices, with the reason.

    Args:
        presets: all presets, by name.
        devices: what was found on this machine.
        cpu_engine: whether the installed engine is the CPU build, which cannot use a GPU.

    Raises:
        ConfigError: no preset covers the GPUs found; lists the presets and says how to pick one.
        PreflightError: there is no GPU, and the installed engine runs on nothing else.
    """
    found = devices.gpus
    if not cpu_engine and not found:
        example = next(name for name, preset in presets.items() if preset.match and not preset.extends)
        raise PreflightError(
            f"no GPU: {devices.reason}, and the installed engine is the GPU build. In a container: start it with "
            "--gpus all on a machine with the NVIDIA Container Toolkit (is nvidia-smi fine on the machine itself?), or "
            "use the -cpu image. Without one: `make setup ENGINE=cpu` installs the CPU engine. To look, as explain "
            f"and plan do, name a preset: --preset {example}"
        )
    if cpu_engine:
        preset = next(preset for preset in presets.values() if preset.match is None)
        reason = devices.reason if not found else f"the installed engine is the CPU build; it leaves {devices} unused"
        return preset, Decision("preset", preset.name, reason)
    matching = [preset for preset in presets.values() if preset.match is not None and preset.extends is None]
    for preset in matching:
        if preset.match is not None and preset.match.covers(found):
            return preset, Decision("preset", preset.name, f"found {devices}")
    partly = [(preset.match.worth, preset) for preset in matching if preset.match and preset.match.within(found)]
    if partly:
        preset = max(partly, key=lambda one: one[0])[1]
        reason = f"no preset is for all of {devices}; this one has the most memory of those for some of them"
        return preset, Decision("preset", preset.name, reason)
    if not _capabilities(presets).intersection(gpu.capability for gpu in found):
        raise ConfigError(
            f"no preset covers the GPUs found ({devices}): voltserve serves on Tesla V100s, and on CPUs. `make setup "
            "ENGINE=cpu` or the -cpu image leaves them unused; for trials, --preset NAME --volta force treats every "
            "card as a V100"
        )
    listing = "\n".join(f"  {preset.name}: {preset.description}" for preset in presets.values())
    raise ConfigError(
        f"no preset covers the GPUs found ({devices}).\nPick one with --preset NAME, or hide GPUs with "
        f"CUDA_VISIBLE_DEVICES so that one fits:\n{listing}"
    )
