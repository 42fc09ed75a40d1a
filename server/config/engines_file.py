"""Several engines behind one gateway: a typed YAML file of models, their replicas, and each replica's GPUs.

    schema: 1
    models:
      - name: qwen                  # in /health, metrics and the log; the replicas are qwen-0 and qwen-1
        flags: {model: /models/qwen, served-model-name: [qwen], max-model-len: 8192}
        replicas: [{gpus: [0, 1]}, {gpus: [2, 3]}]
      - name: small
        flags: {model: /models/small, served-model-name: [small]}
        replicas: [{gpus: [4]}]
        on_demand: true             # runs while requests want it; may share its GPUs with others that do

A model's flags are serve's and vLLM's own, and beat the command line. The gateway's settings (--port, --keys-file) stay
on the command line. Each replica picks its own preset, for its own GPUs. docs/engines.md describes each key.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.config.devices import Devices, find_devices
from server.config.flags import FlagValue, check_value, parse_arguments
from server.config.on_demand import CPU, OnDemand
from server.config.presets import Preset
from server.config.settings import Config, all_flags, load_config, setting_flags, variable_name
from server.config.typed_yaml import read_yaml
from server.decisions import Decision
from server.errors import ConfigError, unknown_name

# Settings that each engine has. All others are the gateway's, and there is one gateway.
OF_AN_ENGINE = frozenset(
    {
        *("model", "served-model-name", "preset", "memory-plan"),
        *("start-timeout", "stop-timeout", "heartbeat-timeout", "step-timeout", "hang-timeout"),
        *("max-in-flight", "queue-size", "queue-timeout"),
    }
)
# Those that a gateway to other machines does not take. It keeps heartbeat-timeout: it judges replicas' silence by its
# own.
OF_A_FILE = OF_AN_ENGINE - {"heartbeat-timeout"} | {"engines"}


# Keys of a model that only one with on_demand has.
OF_ON_DEMAND = ("pinned", "idle_timeout", "min_residence", "drain_timeout")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Replica(_Strict):
    """One engine. `gpus` by their indexes as nvidia-smi and CUDA_VISIBLE_DEVICES leave them; None without GPUs."""

    gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = Field(
        None, description="Its GPUs by index. May be left out without GPUs, or where the file has one replica in all."
    )


class Model(_Strict):
    """One model and its replicas."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] = Field(
        description="Its name in /health, metrics and the log; of several replicas, with -0, -1, … after it."
    )
    flags: dict[str, FlagValue] = Field(
        description="Flags of `voltserve serve` and of vLLM's server, without dashes; they beat the command line."
    )
    replicas: Annotated[tuple[Replica, ...], Field(min_length=1)] = Field(
        (Replica(gpus=None),), description="Engines with this model, one each. Requests go to the least busy."
    )
    on_demand: bool = Field(
        False, description="Whether its engine runs only while requests want it. Its GPUs may then be shared."
    )
    pinned: bool = Field(
        False,
        description="With on_demand: once started it stays, and shares no GPU; without GPUs it runs beside others.",
    )
    idle_timeout: Annotated[float, Field(ge=0)] = Field(
        0, description="With on_demand: seconds without a request after which it is stopped; 0: never."
    )
    min_residence: Annotated[float, Field(ge=0)] | None = Field(
        None, description="With on_demand: seconds in use before another model gets its place; else as its start took."
    )
    drain_timeout: Annotated[float, Field(gt=0)] = Field(
        300, description="With on_demand: seconds in which requests may finish before it makes room."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> "Model":
        given = [name for name in OF_ON_DEMAND if name in self.model_fields_set]
        if given and not self.on_demand:
            raise ValueError(f"{given[0]} is for models with on_demand: true; others always run")
        if self.pinned and {"idle_timeout", "min_residence", "drain_timeout"} & self.model_fields_set:
            raise ValueError("a pinned model stays once it is started; leave out the times")
        if self.on_demand and len(self.replicas) > 1:
            raise ValueError("a model on demand has one replica; leave out on_demand, or the other replicas")
        return self

    @property
    def makes_room(self) -> bool:
        """Whether it leaves its place to others."""
        return self.on_demand and not self.pinned

    def demand(self) -> OnDemand | None:
        """How its engine shares its place; None where it always runs."""
        if not self.on_demand:
            return None
        gpus = self.replicas[0].gpus
        places = frozenset(f"GPU {gpu}" for gpu in gpus) if gpus is not None else frozenset({CPU})
        if self.pinned:
            return OnDemand(places=places if gpus is not None else frozenset())
        return OnDemand(
            places=places,
            idle_timeout=self.idle_timeout,
            min_residence=self.min_residence,
            drain_timeout=self.drain_timeout,
        )


class EnginesFile(_Strict):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema", description="The version of this format.")
    models: Annotated[tuple[Model, ...], Field(min_length=1)] = Field(description="The models that are served.")


def load_configs(
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    devices: Callable[[], Devices] = find_devices,
    presets: Mapping[str, Preset] | None = None,
) -> tuple[Config, ...]:
    """One configuration per engine: those of the file given as --engines, else the one of `load_config`.

    Raises:
        ConfigError: as `load_config`; or the file is malformed or contradicts itself, the command line or the machine.
        PreflightError: the GPUs cannot be asked for.
    """
    environ = os.environ if environ is None else environ
    given = {name for name, flag in all_flags().items() if variable_name(name) in environ}
    command_line = parse_arguments(arguments, all_flags())
    path = str(command_line.get("engines", environ.get(variable_name("engines"), "")))
    if not path:
        return (load_config(arguments, environ, devices, presets),)
    for name in ("model", "served-model-name"):
        if name in command_line or name in given:
            raise ConfigError(f"--{name} and --engines exclude each other: the models are those of {path}")
    file = read_yaml(EnginesFile, Path(path), "--engines")
    found = devices()
    _check_gpus(path, file, found)
    configs = []
    for model in file.models:
        flags = checked_flags(f"{path}: model {model.name}", model.flags, "serve")
        for index, replica in enumerate(model.replicas):
            name = model.name if len(model.replicas) == 1 else f"{model.name}-{index}"
            gpus = found.gpus if replica.gpus is None else tuple(found.gpus[gpu] for gpu in replica.gpus)
            layer = (f"{path} model {model.name}", flags)
            config = load_config(arguments, environ, partial(Devices, gpus, found.reason), presets, layer)
            own = {"name": name, "pinned": replica.gpus is not None, "demand": model.demand()}
            configs.append(config.model_copy(update=own))
    _check_names(path, file, configs)
    return tuple(_with_decision(config, configs) for config in configs)


def _with_decision(config: Config, configs: Sequence[Config]) -> Config:
    """Adds to an engine on demand the places that it shares."""
    demand = config.demand
    if demand is None:
        return config
    others = [other.name for other in configs if other is not config and other.demand and demand.collides(other.demand)]
    places = " and ".join(sorted(demand.places))
    reason = f"shares {places} with {', '.join(others)}; one of them runs at a time" if others else "shares no place"
    decision = Decision("on demand", "started by the first request for it", reason)
    return config.model_copy(update={"decisions": (*config.decisions, decision)})


def checked_flags(where: str, flags: Mapping[str, FlagValue], command: str) -> dict[str, FlagValue]:
    """An engine's flags as a file has them.

    Args:
        where: the place in the file, for errors.
        flags: by name.
        command: whose command line has the gateway's settings.

    Raises:
        ConfigError: an unknown flag, with the nearest known one; a value of the wrong kind; a setting of the gateway's.
    """
    known = all_flags()
    gateway = setting_flags().keys() - OF_AN_ENGINE
    checked = {}
    for name, value in flags.items():
        if name in gateway:
            raise ConfigError(f"{where}: {name} is the gateway's, for all models; give --{name} to {command}")
        if name not in known:
            raise ConfigError(f"{where}: {unknown_name('flag', name, known)}")
        try:
            checked[name] = check_value(known[name], value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return checked


def _check_gpus(path: str, file: EnginesFile, found: Devices) -> None:
    replicas = [(model, replica) for model in file.models for replica in model.replicas]
    holders: dict[int, Model] = {}
    for model, replica in replicas:
        where = f"{path}: model {model.name}"
        if replica.gpus is None and found.gpus and len(replicas) > 1:
            raise ConfigError(f"{where}: a replica without gpus; say which of {len(found.gpus)} it gets")
        for gpu in replica.gpus or ():
            if gpu >= len(found.gpus):
                raise ConfigError(f"{where}: no GPU {gpu}; found {len(found.gpus)}: {found}")
            other = holders.get(gpu)
            if other is not None and (other is model or not (other.makes_room and model.makes_room)):
                raise ConfigError(
                    f"{path}: GPU {gpu} is given twice, to {other.name} and to {model.name}; only models with "
                    "on_demand: true share GPUs, and not those that are pinned"
                )
            holders[gpu] = model


def _check_names(path: str, file: EnginesFile, configs: Sequence[Config]) -> None:
    names = [model.name for model in file.models]
    if len(set(names)) < len(names) or len({config.name for config in configs}) < len(configs):
        raise ConfigError(f"{path}: two models of one name among {', '.join(names)}")
    serving: dict[str, str] = {}
    for config in configs:
        for name in config.served_model_name:
            if serving.setdefault(name, config.model) != config.model:
                raise ConfigError(f"{path}: both {serving[name]} and {config.model} are served as {name!r}")
            if config.demand is not None and sum(name in other.served_model_name for other in configs) > 1:
                raise ConfigError(f"{path}: {name!r} is on demand at {config.name}, and served by another model, too")
