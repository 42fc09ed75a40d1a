"""Presets: typed, versioned YAML files in `configs/presets/`, one per kind of machine, and the choice among them.

A preset gives the engine's flags and environment for the devices it `match`es. Every limit carries its provenance:
`computed` (from sizes, or a document's claim) or `measured` (with the result's source). Nothing in a preset is code.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.config.devices import Device, Devices
from server.config.flags import FlagValue, check_value, engine_flags
from server.decisions import UNUSED_CARDS, Decision
from server.errors import ConfigError, PreflightError, unknown_name

PRESETS_FOLDER = Path(__file__).parents[2] / "configs" / "presets"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limit(_Strict):
    """A limit's value, and how it is known."""

    value: int | float | str
    provenance: Literal["computed", "measured"]
    source: str = Field(min_length=1)


class Match(_Strict):
    """The devices a preset is for: exactly `count` alike GPUs; `nvlink` is null where links do not matter."""

    count: int = Field(ge=1)
    capability: str = Field(pattern=r"^\d+\.\d$")
    memory_gib: int
    nvlink: bool | None

    def covers(self, devices: Sequence[Device]) -> bool:
        """Whether these are the devices meant. Every one is looked at: mixed GPUs match no preset."""
        return len(devices) == self.count and all(
            device.capability == self.capability
            and device.memory_gib == self.memory_gib
            and self.nvlink in (None, device.nvlink)
            for device in devices
        )

    def within(self, devices: Sequence[Device]) -> bool:
        """Whether enough of these devices are the ones meant. Over PCIe cards with NVLink work as well."""
        links = (True,) if self.nvlink else (True, False)
        alike = [
            device
            for device in devices
            if device.capability == self.capability and device.memory_gib == self.memory_gib and device.nvlink in links
        ]
        return len(alike) >= self.count

    @property
    def worth(self) -> tuple[int, int, bool]:
        """To choose among presets for some of the cards: all memory, then fewer cards, then NVLink."""
        return self.count * self.memory_gib, -self.count, bool(self.nvlink)


class Automatic(_Strict):
    """An environment value found on the machine: a rank's share of `cores`, or a `library` beside this Python."""

    cores: Literal[True] | None = None
    library: str | None = None

    def __str__(self) -> str:
        return "the number of cores a rank" if self.library is None else f"{self.library} in {sys.prefix}/lib"

    def resolve(self, prefix: Path, ranks: int = 1) -> str | None:
        """The value for each of `ranks` processes that compute at once, or None where the library is absent."""
        if self.library is None:
            return str(max(1, usable_cores() // ranks))
        path = prefix / "lib" / self.library
        return str(path) if path.is_file() else None


class Preset(_Strict):
    """One preset file. `match` is null for machines without a GPU the engine can use.

    One that `extends` another takes all that it does not say from that one, and is used only where it is asked for.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str
    extends: str | None = None
    match: Match | None
    engine: dict[str, FlagValue] = Field(default_factory=dict)
    limits: dict[str, Limit] = Field(default_factory=dict)
    env: dict[str, str | Automatic] = Field(default_factory=dict)

    def flags(self) -> dict[str, FlagValue]:
        """The engine's flags, limits included, checked against vLLM's own.

        Raises:
            ConfigError: a flag vLLM does not have (names the nearest), a value it does not take, a flag given twice.
        """
        known = engine_flags()
        checked: dict[str, FlagValue] = {}
        for name, value in [*self.engine.items(), *((name, limit.value) for name, limit in self.limits.items())]:
            if name not in known:
                raise ConfigError(f"preset {self.name}: {unknown_name('engine flag', name, known)}")
            if name in checked:
                raise ConfigError(f"preset {self.name}: {name} is both under engine and under limits; keep one")
            try:
                checked[name] = check_value(known[name], value)
            except ConfigError as error:
                raise ConfigError(f"preset {self.name}: {error}") from error
        return checked


def load_presets(folder: Path = PRESETS_FOLDER) -> dict[str, Preset]:
    """Every preset by name.

    Raises:
        ConfigError: a file that is not a preset; names the file, the key and the nearest valid key.
    """
    return dict(_load_presets(folder, tuple((path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.yaml")))))


@lru_cache(maxsize=4)
def _load_presets(folder: Path, files: tuple[tuple[Path, int], ...]) -> dict[str, Preset]:
    """Read once: several questions about one start are each answered from the presets."""
    presets = (load_preset(path) for path, _ in files)
    return {preset.name: preset for preset in presets}


def find_preset(asked: str, presets: Mapping[str, Preset]) -> Preset:
    """The preset of this name, or in this file where `asked` ends in .yaml.

    Raises:
        ConfigError: there is none (names the nearest), or the file is no preset.
    """
    if asked.endswith(".yaml"):
        return load_preset(Path(asked))
    if asked not in presets:
        raise ConfigError(unknown_name("preset", asked, presets))
    return presets[asked]


def load_preset(path: Path) -> Preset:
    """The preset of a file.

    Raises:
        ConfigError: it cannot be read, or is not a preset; names the file, the key and the nearest valid key.
    """
    try:
        preset = Preset.model_validate(_read_extended(path))
        preset.flags()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a preset file, got: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    if preset.name != path.stem:
        raise ConfigError(f"{path}: the preset's name is {preset.name!r}, expected the file's, {path.stem!r}")
    return preset


def _read_extended(path: Path) -> object:
    """What a preset's file says, over what the preset of the same folder says that it extends. Raises ConfigError."""
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(said, dict) or not isinstance(said.get("extends"), str):
        return said
    base_path = path.with_name(f"{said['extends']}.yaml")
    names = [other.stem for other in path.parent.glob("*.yaml") if other != path]
    if base_path.stem not in names:
        raise ConfigError(f"extends: {unknown_name('preset', said['extends'], names)}")
    base = yaml.safe_load(base_path.read_text(encoding="utf-8"))
    if not isinstance(base, dict) or "extends" in base:
        raise ConfigError(f"extends: expected a preset that extends none, got {said['extends']}")
    parts = {key: {**base.get(key, {}), **said.get(key, {})} for key in ("engine", "limits", "env")}
    return {**base, **said, **parts}


# The keys of each part of a preset file, to name the nearest when one is unknown.
_KEYS: Mapping[str, type[_Strict]] = {"": Preset, "match": Match, "limits": Limit, "env": Automatic}


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        model = _KEYS[where[0] if len(where) > 1 else ""]
        keys = [field.alias or name for name, field in model.model_fields.items()]
        parent = ".".join(where[:-1])
        return unknown_name(f"key in {parent}" if parent else "key", where[-1], keys)
    return f"{'.'.join(where) or 'file'}: {problem['msg']}, got {problem['input']!r}"


def unused_cards(presets: Mapping[str, Preset], devices: Devices, *, cpu_engine: bool) -> list[Decision]:
    """What to tell where the engine is vLLM's CPU build and the machine has cards that the CUDA build would use."""
    ours = {preset.match.capability for preset in presets.values() if preset.match is not None}
    if not cpu_engine or not ours.intersection(gpu.capability for gpu in devices.gpus):
        return []
    remedy = "`make setup ENGINE=gpu` installs the GPU engine"
    return [Decision(*UNUSED_CARDS, f"{devices} stays unused, which would serve many times faster; {remedy}")]


def select_preset(presets: Mapping[str, Preset], devices: Devices, *, cpu_engine: bool) -> tuple[Preset, Decision]:
    """The preset for these devices, with the reason: a pure function.

    Args:
        presets: all presets, by name.
        devices: what was found on this machine.
        cpu_engine: whether the installed engine is vLLM's CPU build, which can use no GPU.

    Raises:
        ConfigError: no preset covers the GPUs found; lists the presets and says how to pick one.
        PreflightError: there is no GPU, and the installed engine runs on nothing else.
    """
    found = devices.gpus
    if not cpu_engine and not found:
        example = next(name for name, preset in presets.items() if preset.match and not preset.extends)
        raise PreflightError(
            f"no GPU: {devices.reason}, and the installed engine is vLLM's CUDA build. In a container: start it with "
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
    listing = "\n".join(f"  {preset.name}: {preset.description}" for preset in presets.values())
    raise ConfigError(
        f"no preset covers the GPUs found ({devices}).\nPick one with --preset NAME, or hide GPUs with "
        f"CUDA_VISIBLE_DEVICES so that one fits:\n{listing}"
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, and the control group's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota_file = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota_file.is_file():
        quota, period = quota_file.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores
