"""One frozen configuration from layers: built in < preset < `VOLTSERVE_*` environment < command line.

Every value keeps its source. A flag of voltserve or of vLLM is the same thing in each layer:
`--max-model-len 8192`, `VOLTSERVE_MAX_MODEL_LEN=8192`, and `max-model-len: 8192` in a preset.
"""

import importlib.metadata
import ipaddress
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from server.config.adaptation import adapt
from server.config.cards import choose_cards, smallest_card
from server.config.devices import Devices, find_devices
from server.config.flags import REFUSED, RETIRED, Flag, FlagValue, engine_flags, parse_arguments, parse_variable
from server.config.modalities import FLAG as TEXT_ONLY
from server.config.modalities import choose_text_only
from server.config.on_demand import OnDemand
from server.config.preset_choice import select_preset, unused_cards
from server.config.presets import (
    Automatic,
    Preset,
    find_preset,
    load_presets,
    usable_cores,
)
from server.decisions import Decision
from server.environment import PREFIX
from server.errors import ConfigError, unknown_name

_OF_A_SERVICE = re.compile(r"_SERVICE_(?:HOST|PORT)|_PORT_\d+_(?:TCP|UDP|SCTP)")
_LISTS = frozenset({"served-model-name", "cors-origins", "forwarded-allow-ips"})

# Engine flags below every preset. The access log is the gateway's; the engine's would be full of heartbeats.
BUILT_IN: Mapping[str, FlagValue] = MappingProxyType({"disable-uvicorn-access-log": True})


class Settings(BaseModel):
    """voltserve's own settings. Each is a flag (`--max-body-bytes`) and a variable (`VOLTSERVE_MAX_BODY_BYTES`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="directory of the model to serve (required, or --engines)")
    engines: str = Field("", description="file of several models and replicas to serve (server/config/engines_file.py)")
    served_model_name: tuple[str, ...] = Field(
        (), description="names clients use, instead of the path given as --model"
    )
    preset: str = Field("", description="preset by name or FILE.yaml, instead of the one that fits the GPUs found")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    start_timeout: float = Field(900, gt=0, description="seconds the engine may take to become ready")
    drain_timeout: float = Field(30, ge=0, description="seconds that requests in flight may finish in after SIGTERM")
    stop_timeout: float = Field(15, gt=0, description="seconds the engine may take to stop before it is killed")
    heartbeat_timeout: float = Field(
        5, gt=0, description="seconds without an answer until the engine counts as degraded"
    )
    hang_timeout: float = Field(
        120, gt=0, description="seconds a degraded engine may take to answer until it is restarted"
    )
    volta: Literal["auto", "force"] = Field(
        "auto", description="auto or force: whether GPUs other than V100s are treated as V100s, for trials"
    )
    memory_plan: Literal["enforce", "warn"] = Field(
        "enforce", description="enforce or warn: what to do where the model cannot fit the GPUs"
    )
    step_timeout: float = Field(
        60, gt=0, description="seconds one step of the engine may take until the engine counts as degraded"
    )
    keys_file: str = Field("", description="file of API keys (voltserve keys); without it no key is needed")
    usage_file: str = Field("", description="file of the tokens that keys used; beside the file of keys by default")
    requests_per_minute: int = Field(0, ge=0, description="requests per minute of one key (or address); 0: no limit")
    max_concurrent: int = Field(0, ge=0, description="requests of one key (or address) at once; 0: no limit")
    max_in_flight: int = Field(256, gt=0, description="requests at the engine at once; more wait in a queue")
    queue_size: int = Field(256, ge=0, description="requests that may wait; more are refused with 503")
    queue_timeout: float = Field(60, gt=0, description="seconds a request may wait")
    max_body_bytes: int = Field(32 * 2**20, gt=0, description="largest request body")
    body_timeout: float = Field(60, gt=0, description="seconds a request body may take to come")
    max_prompt_chars: int = Field(2_000_000, gt=0, description="longest prompt, in characters or tokens")
    max_sequences: int = Field(128, gt=0, description="prompts times n in one request")
    forwarded_allow_ips: tuple[str, ...] = Field(
        ("127.0.0.1",), description="proxies, as addresses or networks, whose X-Forwarded-For names the client; or *"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web origins whose pages may call, such as https://app.example"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text or json")

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _are_addresses(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            if one != "*":
                ipaddress.ip_network(one)
        return given


class Config(Settings):
    """Everything `serve` does, decided before anything starts.

    `served_model_name` is never empty; `engine` has vLLM's flags by name; `env` is what the preset adds to the engine's
    environment; `sources` has each value's source; `gpus_needed`, of this machine, is 0 on a preset
    without GPUs. Where there are several engines, `name` is this one's, and `pinned` says that it gets `devices` and no
    others. `demand` is set for an engine that runs only while requests want it.
    """

    engine: Mapping[str, FlagValue]
    env: Mapping[str, str]
    sources: Mapping[str, str]
    decisions: tuple[Decision, ...]
    devices: Devices
    gpus_needed: int
    name: str = ""
    pinned: bool = False
    demand: OnDemand | None = None

    @property
    def over_ray(self) -> bool:
        """Whether Ray starts the engine's workers: a pipeline stage may then be on another machine."""
        return self.engine.get("distributed-executor-backend") == "ray"


def setting_flags() -> dict[str, Flag]:
    """voltserve's own settings as flags. Their values stay text until the configuration is validated as a whole."""
    names = (name.replace("_", "-") for name in Settings.model_fields)
    return {name: Flag(name, kind="text", several=name in _LISTS) for name in names}


def all_flags() -> dict[str, Flag]:
    """Every flag of `voltserve serve`: vLLM's, and voltserve's own in place of those of the same name."""
    retired = {name: Flag(name, kind="switch") for name in RETIRED}
    return {**engine_flags(), **retired, **setting_flags()}


def load_config(
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    devices: Callable[[], Devices] = find_devices,
    presets: Mapping[str, Preset] | None = None,
    last: tuple[str, Mapping[str, FlagValue]] = ("", {}),
) -> Config:
    """Merges preset, environment and command line.

    Args:
        arguments: the command line after `serve`.
        environ: the environment; the process's own by default.
        devices: finds the GPUs.
        presets: the presets by name; those of `configs/presets` by default.
        last: a layer that beats the command line, with its name.

    Raises:
        ConfigError: anything unknown or malformed, with the nearest valid name.
        PreflightError: the GPUs cannot be asked for.
    """
    environ = os.environ if environ is None else environ
    presets = load_presets() if presets is None else presets
    command_line = parse_arguments(arguments, all_flags())
    variables = _read_variables(environ)
    merged = _Merged()
    found = devices()

    asked = str({**variables, **command_line, **last[1]}.get("preset", ""))
    preset = find_preset(asked, presets) if asked else merged.choose_preset(presets, found)
    merged.add_layer("built in", BUILT_IN)
    merged.add_layer(f"preset {preset.name}", preset.flags())
    merged.add_layer("environment", variables)
    merged.add_layer("command line", command_line)
    merged.add_layer(*last)

    settings = merged.take_settings(asked or preset.name)  # a file's path stays: it is looked up again
    merged.adapt_to_model(settings.model)
    gpus_needed = _parallelism(merged.values) if preset.match is not None else 0
    if preset.match is not None:
        found, decisions = choose_cards(found, preset.match, gpus_needed, forced=settings.volta == "force")
        merged.decisions += decisions
    merged.choose_modalities(settings.model, smallest_card(found, preset, gpus_needed))
    cpu_ranks = 1 if preset.match else _parallelism(merged.values)
    return Config(
        **settings.model_dump(),
        engine=merged.values,
        env=_preset_environment(preset, cpu_ranks, merged.decisions),
        sources=merged.sources,
        decisions=tuple(merged.decisions),
        devices=found,
        gpus_needed=gpus_needed,
    )


@dataclass
class _Merged:
    """The flags' values while layers are merged, the source of each, and the decisions made on the way."""

    values: dict[str, FlagValue] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def choose_preset(self, presets: Mapping[str, Preset], found: Devices) -> Preset:
        """The preset that fits the devices found. Raises ConfigError or PreflightError where none does."""
        cpu_engine = engine_is_cpu_build()
        preset, decision = select_preset(presets, found, cpu_engine=cpu_engine)
        self.decisions += [decision, *unused_cards(presets, found, cpu_engine=cpu_engine)]
        return preset

    def add_layer(self, layer: str, given: Mapping[str, FlagValue]) -> None:
        """Puts a layer's values over those of the layers before it. Raises ConfigError for a flag that is refused."""
        for name, value in given.items():
            source = f"environment {variable_name(name)}" if layer == "environment" else layer
            if name in REFUSED:
                raise ConfigError(f"--{name} ({source}) is not for users of voltserve: {REFUSED[name]}")
            if name in RETIRED:
                self.decisions.append(Decision(f"--{name}", "accepted without effect", RETIRED[name]))
            else:
                self.values[name] = value
                self.sources[name] = source

    def take_settings(self, preset: str) -> Settings:
        """Moves voltserve's own settings out of `values`, which keeps the engine's flags. Raises ConfigError."""
        own = {name.replace("-", "_"): self.values.pop(name) for name in setting_flags() if name in self.values}
        own["preset"] = preset
        self.sources.setdefault("preset", "chosen for the devices found")
        settings = _validate(own, self.sources)
        if not settings.served_model_name:
            settings = settings.model_copy(update={"served_model_name": (settings.model,)})
            self.sources["served-model-name"] = "the model's path as given"
        for name in setting_flags():
            self.sources.setdefault(name, "default")
        self.decisions += _listening(settings)
        return settings

    def adapt_to_model(self, model: str) -> None:
        """Lowers the preset's limits to those of a smaller model."""
        for flag, value, decision in adapt(Path(model), self.values, self.sources):
            self.values[flag] = value
            self.sources[flag] = "the preset's, as far as the model allows"
            self.decisions.append(decision)

    def choose_modalities(self, model: str, smallest_gib: float | None) -> None:
        """Leaves the image encoder out where a card is too small for it."""
        if text_only := choose_text_only(Path(model), self.values, smallest_gib):
            self.values[TEXT_ONLY] = True
            self.sources[TEXT_ONLY] = "chosen for the model and the devices"
            self.decisions.append(text_only)


def load_settings(
    arguments: Sequence[str], environ: Mapping[str, str], file: str, of_an_engine: Collection[str]
) -> Settings:
    """voltserve's own settings for a gateway whose engines are configured in a file.

    Args:
        arguments: the command line.
        environ: the environment; its settings of engines are for this machine's engines, and ignored here.
        file: takes the model's place.
        of_an_engine: settings that belong in the file.

    Raises:
        ConfigError: anything unknown or malformed; a setting on the command line that belongs in the file.
    """
    command_line = parse_arguments(arguments, all_flags())
    for name in command_line:
        if name in of_an_engine or name not in setting_flags():
            raise ConfigError(f"--{name} is an engine's: put it into {file}, under its model's flags")
    given = {**_read_variables(environ), **command_line}
    own = {name.replace("-", "_"): given[name] for name in given.keys() & setting_flags().keys() - of_an_engine}
    own["model"] = file
    return _validate(own, dict.fromkeys(given, "the command line or the environment"))


def _parallelism(values: Mapping[str, FlagValue]) -> int:
    """GPUs of this machine: all, or one pipeline stage's where Ray finds places for the stages."""
    over_ray = values.get("distributed-executor-backend") == "ray"
    kinds = ("tensor", "data") if over_ray else ("tensor", "pipeline", "data")
    sizes = (values.get(f"{kind}-parallel-size", 1) for kind in kinds)
    return math.prod(int(str(size)) for size in sizes)


def variable_name(flag: str) -> str:
    """The environment variable of a flag."""
    return PREFIX + flag.upper().replace("-", "_")


def _read_variables(environ: Mapping[str, str]) -> dict[str, FlagValue]:
    flags = {variable_name(name): flag for name, flag in all_flags().items()}
    values: dict[str, FlagValue] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if _OF_A_SERVICE.search(variable):
            raise ConfigError(
                f"{variable}: Kubernetes sets it for a Service named voltserve. Set `enableServiceLinks: false` in the "
                "pod's spec, as configs/kubernetes/voltserve.yaml does, or give the Service another name"
            )
        if variable not in flags:
            raise ConfigError(unknown_name("environment variable", variable, flags))
        try:
            values[flags[variable].name] = parse_variable(flags[variable], text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from error
    return values


def _validate(own: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    if "model" not in own:
        raise ConfigError(
            "no model given: name its directory with --model DIR or VOLTSERVE_MODEL, or several with --engines FILE"
        )
    try:
        return Settings.model_validate(own)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]).replace("_", "-")
        what = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{name} ({sources[name]}): {what}, got {problem['input']!r}") from error


def _listening(settings: Settings) -> list[Decision]:
    if is_loopback(settings.host):
        return []
    who = "who has an API key" if settings.keys_file else "who can reach this address; --keys-file asks for a key"
    reason = f"asked for; the model can be used by anyone {who}"
    return [Decision("listening", f"{settings.host}, beyond this machine", reason)]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _preset_environment(preset: Preset, cpu_ranks: int, decisions: list[Decision]) -> dict[str, str]:
    environment: dict[str, str] = {}
    for name, value in preset.env.items():
        resolved = value if isinstance(value, str) else value.resolve(Path(sys.prefix), cpu_ranks)
        if resolved is None:
            decisions.append(Decision(name, "not set", f"{value} is absent; the engine is slower without it"))
            continue
        environment[name] = resolved
        if cpu_ranks > 1 and isinstance(value, Automatic) and value.cores:
            decisions.append(Decision(name, resolved, f"{usable_cores()} cores shared by {cpu_ranks} ranks"))
    return environment


def engine_is_cpu_build() -> bool:
    """Whether the installed engine has kernels for CPUs only.

    Raises:
        ConfigError: none is installed.
    """
    try:
        importlib.metadata.version("vllm")
        return "cuda" not in importlib.metadata.version("voltserve-kernels")
    except importlib.metadata.PackageNotFoundError as error:
        missing = f"no engine is installed: {error.name} is missing from this Python; run `make setup`"
        raise ConfigError(missing) from error
