"""`voltserve version --check-config`: settings of another version's files that this version no longer takes.

Files are an `.env`, a preset and a file of `--engines`. Every finding of a file is listed, where `serve` stops at the
first. Models, GPUs and paths are not looked at: the check runs anywhere, before an upgrade.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from server.config.engines_file import EnginesFile, checked_flags
from server.config.flags import REFUSED, RETIRED, check_value, engine_flags, parse_variable
from server.config.presets import find_preset, load_preset, load_presets
from server.config.settings import Settings, all_flags, setting_flags, variable_name
from server.environment import PREFIX
from server.errors import ConfigError, UserError, unknown_name

# What docker-compose.yml and docker-compose.ray.yml read from .env.
COMPOSE = frozenset(
    {
        *("COMPOSE_PROFILES", "MODEL_DIR", "BIND", "PORT", "ENGINES_FILE", "CLUSTER_FILE"),
        *("HEAD_IP", "INTERFACE", "NODE_IP", "PROMETHEUS_PORT", "GRAFANA_PORT", "ALERTMANAGER_PORT"),
        *("ALERTMANAGER_CONFIG", "ALERT_SECRET_FILE", "MODELS_DIR", "FETCH_MODEL", "FETCH_NAME"),
        *(
            f"{kind}_IMAGE"
            for kind in ("GPU", "CPU", "FETCH", "GPU_RAY", "CPU_RAY", "PROMETHEUS", "ALERTMANAGER", "GRAFANA")
        ),
    }
)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_VERSION = re.compile(r"voltserve:(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Outdated:
    """A setting that this version does not take, or takes otherwise. `note`: it does no harm."""

    where: str
    setting: str
    what: str
    note: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.setting}: {'(note) ' if self.note else ''}{self.what}"


def check_file(path: Path, version: str) -> list[Outdated]:
    """All findings of one file.

    Args:
        path: an .env, or a YAML file: a preset or a file of --engines.
        version: of this voltserve.

    Raises:
        UserError: it cannot be read, or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--check-config: {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix not in {".yaml", ".yml"}:
        return list(_check_env(path, text, version))
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--check-config: {path} is not YAML: {error}") from error
    keys = content.keys() if isinstance(content, dict) else set()
    if "models" in keys:
        return list(_check_engines(path, content))
    if keys & {"engine", "limits", "match", "extends"}:
        return list(_check_preset(path, content))
    raise UserError(
        f"--check-config: {path}: expected an .env, a preset (engine, limits, match) or a file of --engines (models)"
    )


def check_variables(variables: Mapping[str, str], where: str) -> list[Outdated]:
    """Findings of the VOLTSERVE_* among these variables."""
    found = []
    for name, value in variables.items():
        if name.startswith(PREFIX) and (problem := _check_variable(name, value)):
            found.append(Outdated(where, name, *problem))
    return found


def _check_env(path: Path, text: str, version: str) -> Iterator[Outdated]:
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            yield Outdated(where, line[:40], "expected NAME=VALUE")
            continue
        name, value = match[1], _unquoted(match[2])
        if name.startswith(PREFIX):
            yield from check_variables({name: value}, where)
        elif name in COMPOSE:
            other = _VERSION.search(value)
            if other is not None and other[1] != version:
                yield Outdated(where, name, f"names the image of {other[1]}; this is {version}", note=True)
        elif near := get_close_matches(name, COMPOSE, n=1, cutoff=0.8):
            yield Outdated(where, name, f"docker-compose.yml reads no such variable; did you mean {near[0]}?")


def _unquoted(value: str) -> str:
    """A value of an .env as Compose reads it: within quotes, or up to a comment."""
    value = value.strip()
    if len(value) > 1 and value[0] in "'\"" and value.endswith(value[0]):
        return value[1:-1]
    return re.split(r"\s#", value, maxsplit=1)[0].strip()


def _check_variable(name: str, value: str) -> tuple[str, bool] | None:
    """What is wrong with a VOLTSERVE_* variable, and whether it is only a note."""
    flags = {variable_name(flag): flag for flag in all_flags()}
    if name not in flags:
        return unknown_name("environment variable", name, flags), False
    flag = flags[name]
    if flag in REFUSED:
        return f"is not for users any more: {REFUSED[flag]}", False
    if flag in RETIRED:
        return f"has no effect: {RETIRED[flag]}", True
    try:
        parsed = parse_variable(all_flags()[flag], value)
        if flag == "preset":
            find_preset(value, {value: load_presets()[value]} if value in load_presets() else load_presets())
        elif flag in setting_flags():
            _check_setting(flag, parsed)
    except ConfigError as error:
        return str(error), False
    return None


def _check_setting(flag: str, value: object) -> None:
    """Raises ConfigError where a setting of voltserve's does not take this value."""
    own = {"model": "any", flag.replace("-", "_"): value}
    try:
        Settings.model_validate(own)
    except ValidationError as error:
        problem = error.errors()[0]
        message = f"--{flag}: {problem['msg'].removeprefix('Value error, ')}, got {problem['input']!r}"
        raise ConfigError(message) from error


def _check_engines(path: Path, content: Mapping[str, Any]) -> Iterator[Outdated]:
    yield from _of_schema(path, EnginesFile, content)
    models = content["models"] if isinstance(content["models"], list) else []
    for index, model in enumerate(models):
        flags = model.get("flags") if isinstance(model, dict) else None
        for name, value in flags.items() if isinstance(flags, dict) else ():
            where = f"{path}: models.{index}.flags"
            if name in REFUSED:
                yield Outdated(where, name, f"is not for users any more: {REFUSED[name]}")
            elif name in RETIRED:
                yield Outdated(where, name, f"has no effect: {RETIRED[name]}", note=True)
            else:
                try:
                    checked_flags(where, {name: value}, "serve")
                except ConfigError as error:
                    yield Outdated(where, name, str(error).removeprefix(f"{where}: "))


def _check_preset(path: Path, content: Mapping[str, Any]) -> Iterator[Outdated]:
    """Each flag by itself; then the file as a whole, for whose first problem it is refused."""
    told = False
    for part in ("engine", "limits"):
        values = content.get(part)
        for name, value in values.items() if isinstance(values, dict) else ():
            problem = _preset_flag(name, value.get("value") if part == "limits" and isinstance(value, dict) else value)
            if problem:
                told = True
                yield Outdated(f"{path}: {part}", name, problem)
    if not told:
        try:
            load_preset(path)
        except ConfigError as error:
            yield Outdated(str(path), "preset", str(error).removeprefix(f"{path}: "))


def _preset_flag(name: str, value: object) -> str:
    if name in REFUSED:
        return f"is not for users any more: {REFUSED[name]}"
    if name not in engine_flags():
        return unknown_name("flag", name, engine_flags())
    try:
        check_value(engine_flags()[name], value)
    except ConfigError as error:
        return str(error)
    return ""


def _of_schema(path: Path, kind: type[EnginesFile], content: Mapping[str, Any]) -> Iterable[Outdated]:
    try:
        kind.model_validate(content)
    except ValidationError as error:
        problems = error.errors()
        for problem in problems:
            if any(len(problem["loc"]) < len(one["loc"]) and _begins(one["loc"], problem["loc"]) for one in problems):
                continue  # a list is too short because its items are wrong
            *where, last = [str(part) for part in problem["loc"]] or ["file"]
            what = (
                "no such key" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
            )
            yield Outdated(f"{path}: {'.'.join(where)}".removesuffix(": "), last, what)


def _begins(place: tuple[int | str, ...], part: tuple[int | str, ...]) -> bool:
    return place[: len(part)] == part
