"""The axes of a sweep, and the points of their grid."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from server.config.flags import FlagValue, engine_flags, parse_variable, render
from server.config.presets import usable_cores
from server.config.render import is_inherited
from server.config.settings import Config
from server.errors import ConfigError, unknown_name

# The default axes. Small on purpose: each point starts the engine once.
GPU_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max-num-seqs": ("8", "16", "32"),
        "gpu-memory-utilization": ("0.85", "0.90", "0.95"),
        "block-size": ("16", "32"),
        "enforce-eager": ("true", "false"),
    }
)
CPU_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max-num-seqs": ("4", "16"),
        "dtype": ("float32", "bfloat16"),
        "OMP_NUM_THREADS": ("1", "CORES"),
        "VLLM_CPU_KVCACHE_SPACE": ("1",),
    }
)
CORES = "CORES"  # stands for the number of usable cores


@dataclass(frozen=True)
class Axis:
    """One setting: an engine `flag`'s values, or an engine variable's (texts)."""

    name: str
    values: tuple[FlagValue, ...]

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return self.name.isupper()


@dataclass(frozen=True)
class Point:
    """One combination: a value per axis, in the axes' order."""

    values: tuple[tuple[str, FlagValue], ...]

    @property
    def flags(self) -> dict[str, FlagValue]:
        """The values that are engine flags."""
        return {name: value for name, value in self.values if not name.isupper()}

    @property
    def variables(self) -> dict[str, str]:
        """The values that are variables of the engine's environment."""
        return {name: str(value) for name, value in self.values if name.isupper()}

    @property
    def arguments(self) -> list[str]:
        """The flags for `serve`'s command line."""
        known = engine_flags()
        return [part for name, value in self.flags.items() for part in render(known[name], value)]

    def __str__(self) -> str:
        return " ".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in self.values
        )


def parse_axes(varied: Sequence[str], config: Config) -> tuple[Axis, ...]:
    """Axes from texts such as `max-num-seqs=8,16` and `OMP_NUM_THREADS=1,2`; a default set where there are none.

    Raises:
        ConfigError: no such flag or variable (names the nearest), a value it does not take, an axis given twice.
    """
    given: dict[str, tuple[str, ...]] = {}
    for text in varied:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("--")
        if not equals or not values.strip():
            raise ConfigError(f"--vary: expected NAME=VALUE,VALUE, got {text!r}")
        if name in given:
            raise ConfigError(f"--vary: {name} is given twice; name all its values at once")
        given[name] = tuple(value.strip() for value in values.split(","))
    chosen = given or (GPU_AXES if config.gpus_needed else CPU_AXES)
    return tuple(
        Axis(name, tuple(dict.fromkeys(_value(name, value) for value in values))) for name, values in chosen.items()
    )


def _value(name: str, text: str) -> FlagValue:
    if name.isupper():
        if not is_inherited(name):
            raise ConfigError(
                f"--vary: {name} is no variable that the engine gets (server/config/render.py, INHERITED)"
            )
        return str(usable_cores()) if text == CORES else text
    known = engine_flags()
    if name not in known:
        raise ConfigError(f"--vary: {unknown_name('engine flag', name, known)}")
    return parse_variable(known[name], text)


def points(axes: Sequence[Axis]) -> tuple[Point, ...]:
    """Every combination; the last axis changes first."""
    names = [axis.name for axis in axes]
    return tuple(
        Point(tuple(zip(names, combination, strict=True)))
        for combination in itertools.product(*(axis.values for axis in axes))
    )
