"""Presets: typed, versioned YAML files in `configs/presets/`, one per kind of machine.

A preset gives the engine's flags and environment for the devices that it matches. Every limit carries its provenance:
`computed` (from sizes, or a document's claim) or `measured` (with the result's source). Nothing in a preset is code.
A file's `variants` are presets too: variant `graphs` of preset `a` is the preset `a-graphs`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.config.devices import Device
from server.config.flags import FlagValue, check_value, engine_flags
from server.errors import ConfigError, unknown_name

PRESETS_FOLDER = Path(__file__).parents[2] / "configs" / "presets"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limit(_Strict):
    """A limit's value, and how it is known."""

    value: int | float | str
    provenance: Literal["computed", "measured"] = Field(description="How the value is known.")
    source: str = Field(min_length=1, description="The calculation, document or result file that it comes from.")


class Match(_Strict):
    """The devices that a preset is for: exactly `count` GPUs of one kind."""

    count: int = Field(ge=1, description="How many GPUs.")
    capability: str = Field(pattern=r"^\d+\.\d$", description="CUDA compute capability; a V100's is 7.0.")
    memory_gib: int = Field(description="Memory of each GPU, rounded to GiB.")
    nvlink: bool | None = Field(description="Whether NVLink connects the GPUs; null where links do not matter.")

    def covers(self, devices: Sequence[Device]) -> bool:
        """Whether these are exactly the devices meant. Mixed GPUs match no preset."""
        return len(devices) == self.count and all(
            device.capability == self.capability
            and device.memory_gib == self.memory_gib
            and self.nvlink in (None, device.nvlink)
            for device in devices
        )

    def within(self, devices: Sequence[Device]) -> bool:
        """Whether enough of these devices are the ones meant. A preset for PCIe also takes cards with NVLink."""
        links = (True,) if self.nvlink else (True, False)
        alike = [
            device
            for device in devices
            if device.capability == self.capability and device.memory_gib == self.memory_gib and device.nvlink in links
        ]
        return len(alike) >= self.count

    @property
    def worth(self) -> tuple[int, int, bool]:
        """Sorts presets that use only some of the cards: most memory first, then fewest cards, then NVLink."""
        return self.count * self.memory_gib, -self.count, bool(self.nvlink)


class Automatic(_Strict):
    """An environment value that is found on the machine: each rank's share of its cores, or a library's path."""

    cores: Literal[True] | None = Field(None, description="The number of cores for each rank.")
    library: str | None = Field(None, description="File name of a library in this Python's lib folder.")

    def __str__(self) -> str:
        return "the number of cores a rank" if self.library is None else f"{self.library} in {sys.prefix}/lib"

    def resolve(self, prefix: Path, ranks: int = 1) -> str | None:
        """The value for each of `ranks` processes that compute at once, or None where the library is absent."""
        if self.library is None:
            return str(max(1, usable_cores() // ranks))
        path = prefix / "lib" / self.library
        return str(path) if path.is_file() else None


Description = Annotated[str, Field(description="One line for people who choose a preset.")]
Flags = Annotated[dict[str, FlagValue], Field(default_factory=dict, description="vLLM's flags, without dashes.")]
Limits = Annotated[
    dict[str, Limit], Field(default_factory=dict, description="vLLM's flags that carry their provenance.")
]
Variables = Annotated[
    dict[str, str | Automatic], Field(default_factory=dict, description="Variables of the engine's environment.")
]


class Variant(_Strict):
    """The changes from a file's preset to another preset of the same file."""

    description: Description
    engine: Flags
    limits: Limits
    env: Variables


class Preset(_Strict):
    """One preset.

    A file that `extends` another preset inherits everything that it does not give itself, except variants. Such a
    preset, and a variant likewise, is never chosen automatically: the user asks for it by name.
    """

    schema_version: Literal[1] = Field(alias="schema", description="The version of this format.")
    name: str = Field(description="The file's name without .yaml.")
    description: Description
    extends: str | None = Field(None, description="Name of the preset in this folder that this one inherits from.")
    match: Match | None = Field(description="The GPUs that it is for; null for machines without a usable GPU.")
    engine: Flags
    limits: Limits
    env: Variables
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9]+$")], Variant] = Field(
        default_factory=dict, description="Presets that differ in a few values; their names are NAME-VARIANT."
    )

    def flags(self) -> dict[str, FlagValue]:
        """The engine's flags, limits included, checked against vLLM's own.

        Raises:
            ConfigError: a flag that vLLM does not have (names the nearest), a value that it does not take, or a flag
                that is given twice.
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

    def with_variants(self) -> "list[Preset]":
        """This preset and its variants, each as a whole preset."""
        return [self, *(self._vary(name, variant) for name, variant in self.variants.items())]

    def _vary(self, name: str, variant: Variant) -> "Preset":
        changes = {
            "name": f"{self.name}-{name}",
            "extends": self.name,
            "description": variant.description,
            "engine": {**self.engine, **variant.engine},
            "limits": {**self.limits, **variant.limits},
            "env": {**self.env, **variant.env},
            "variants": {},
        }
        return self.model_copy(update=changes)


def load_presets(folder: Path = PRESETS_FOLDER) -> dict[str, Preset]:
    """Every preset by name, variants included.

    Raises:
        ConfigError: a file is not a preset (the error names the file, the key and the nearest valid key), or two have
        one name.
    """
    return dict(_load_presets(folder, tuple((path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.yaml")))))


@lru_cache(maxsize=4)
def _load_presets(folder: Path, files: tuple[tuple[Path, int], ...]) -> dict[str, Preset]:
    """Reads each file once: several parts of one start ask for the presets."""
    presets: dict[str, Preset] = {}
    for path, _ in files:
        for preset in _load_file(path):
            if preset.name in presets:
                raise ConfigError(f"{path}: there are two presets of the name {preset.name!r}")
            presets[preset.name] = preset
    return dict(sorted(presets.items(), key=lambda item: f"{item[0]}.yaml"))


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
    """The preset of a file. Where there is no file `a-graphs.yaml`, the variant `graphs` of `a.yaml`.

    Raises:
        ConfigError: it cannot be read, or is not a preset; names the file, the key and the nearest valid key.
    """
    base = path.with_name(f"{path.stem.rpartition('-')[0]}.yaml")
    if not path.exists() and base.is_file():
        for preset in _load_file(base):
            if preset.name == path.stem:
                return preset
    return _load_file(path)[0]


def _load_file(path: Path) -> list[Preset]:
    """A file's preset, then its variants. Raises ConfigError."""
    try:
        presets = Preset.model_validate(_read_extended(path)).with_variants()
        for preset in presets:
            preset.flags()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a preset file, got: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    if presets[0].name != path.stem:
        raise ConfigError(f"{path}: the preset's name is {presets[0].name!r}, expected the file's, {path.stem!r}")
    return presets


def _read_extended(path: Path) -> object:
    """A preset file's content, merged over the content of the preset that it extends. Raises ConfigError."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("extends"), str):
        return content
    base_path = path.with_name(f"{content['extends']}.yaml")
    names = [other.stem for other in path.parent.glob("*.yaml") if other != path]
    if base_path.stem not in names:
        raise ConfigError(f"extends: {unknown_name('preset', content['extends'], names)}")
    base = yaml.safe_load(base_path.read_text(encoding="utf-8"))
    if not isinstance(base, dict) or "extends" in base:
        raise ConfigError(f"extends: expected a preset that extends none, got {content['extends']}")
    base.pop("variants", None)
    parts = {key: {**base.get(key, {}), **content.get(key, {})} for key in ("engine", "limits", "env")}
    return {**base, **content, **parts}


# The model of each part of a preset file. An unknown key's error names the nearest key of its part.
_PARTS: Mapping[str, type[_Strict]] = {
    "": Preset,
    "match": Match,
    "limits": Limit,
    "env": Automatic,
    "variants": Variant,
}


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        model = _part(where)
        keys = [field.alias or name for name, field in model.model_fields.items()]
        parent = ".".join(where[:-1])
        return unknown_name(f"key in {parent}" if parent else "key", where[-1], keys)
    return f"{'.'.join(where) or 'file'}: {problem['msg']}, got {problem['input']!r}"


def _part(where: Sequence[str]) -> type[_Strict]:
    """The model that lacks the last key of this path."""
    if where[0] == "variants" and len(where) > 3:
        where = where[2:]
    return _PARTS[where[0] if len(where) > 1 else ""]


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, and the control group's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota_file = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota_file.is_file():
        quota, period = quota_file.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores
