"""Flags as data: what vLLM 0.28.0's server accepts, and how a flag's text becomes a typed value.

`scripts/engine_flags.py` generates `configs/engine_flags.json` from vLLM's own parser. So flags are checked without
importing vLLM and before anything starts, and an error names the nearest valid flag.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from server.errors import ConfigError, unknown_name

FlagValue = bool | int | float | str | list[Any] | dict[str, Any]

FLAGS_FILE = Path(__file__).parents[2] / "configs" / "engine_flags.json"

# Flags of vLLM's server that the gateway or the supervisor owns, with what to use instead.
REFUSED = MappingProxyType(
    {
        "uds": "the engine's socket is private to voltserve; clients use --host and --port",
        "headless": "voltserve starts exactly one engine with its API",
        "api-server-count": "the engine has one API process behind the gateway",
        "config": "use a preset (--preset), VOLTSERVE_* variables or flags",
        "api-key": "the engine is reachable through the gateway only and has no keys of its own",
        "hf-token": "models are local directories and nothing is fetched while serving",
        "root-path": "the gateway answers clients, at the root path",
        "middleware": "the gateway answers clients; the engine takes no middleware",
        "log-config-file": "the engine's log is read by the supervisor; use --log-format and --log-level",
        "enable-ssl-refresh": "the engine listens on a private socket; put TLS in front of the gateway",
        **{
            f"ssl-{name}": "the engine listens on a private socket; put TLS in front of the gateway"
            for name in ("keyfile", "certfile", "ca-certs", "cert-reqs", "ciphers")
        },
        **{
            f"allow{name}": "the gateway answers clients; the engine sees no cross-origin request"
            for name in ("-credentials", "ed-origins", "ed-methods", "ed-headers")
        },
    }
)

# Flags in documents of older vLLM releases that 0.28.0's parser no longer knows, with their meaning today.
RETIRED = MappingProxyType(
    {"disable-log-requests": "removed from vLLM: requests are not logged unless --enable-log-requests is given"}
)

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Flag:
    """One flag: `name` without dashes, `kind` of value (switch, text, json, integer, number, size, auto_size)."""

    name: str
    kind: str
    several: bool = False
    negatable: bool = False
    choices: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def engine_flags() -> Mapping[str, Flag]:
    """vLLM's flags by name."""
    flags = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))["flags"]
    return MappingProxyType(
        {
            name: Flag(
                name=name,
                kind=flag["kind"],
                several=flag.get("several", False),
                negatable=flag.get("negatable", False),
                choices=tuple(flag.get("choices", ())),
                short=tuple(flag.get("short", ())),
            )
            for name, flag in flags.items()
        }
    )


def parse_text(flag: Flag, text: str) -> FlagValue:
    """One value of a flag from text, as on a command line.

    Raises:
        ConfigError: `text` is no such value; says what was expected.
    """
    if flag.choices and text not in flag.choices:
        raise ConfigError(f"--{flag.name}: {unknown_name('value', text, flag.choices)}")
    try:
        if flag.kind == "integer":
            return int(text)
        if flag.kind == "number":
            return float(text)
        if flag.kind in {"size", "auto_size"}:
            return _size(text, allow_auto=flag.kind == "auto_size")
        if flag.kind == "json":
            return _json_value(text)
    except ValueError as error:
        expected = {
            "integer": "an integer",
            "number": "a number",
            "size": "a count such as 8192, 8k (8000) or 8K (8192)",
            "auto_size": "a count such as 8192, 8k (8000) or 8K (8192), or auto",
            "json": "a JSON object or list",
        }[flag.kind]
        raise ConfigError(f"--{flag.name}: expected {expected}, got {text!r}") from error
    return text


def _size(text: str, *, allow_auto: bool) -> FlagValue:
    if allow_auto and text in {"auto", "-1"}:
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None:
        raise ValueError(text)
    amount = float(match[1]) * _SIZES[match[2]]
    if amount != int(amount):
        raise ValueError(text)
    return int(amount)


def _json_value(text: str) -> FlagValue:
    value = json.loads(text)
    if isinstance(value, dict | list):
        return value
    raise ValueError(text)


def check_value(flag: Flag, value: object) -> FlagValue:
    """A flag's value as a preset gives it (already typed by YAML), checked like text from a command line.

    Raises:
        ConfigError: the value is of another kind.
    """
    if flag.kind == "switch":
        if not isinstance(value, bool):
            raise ConfigError(f"{flag.name}: expected true or false, got {value!r}")
        return value
    if flag.several:
        if not isinstance(value, list):
            raise ConfigError(f"{flag.name}: expected a list, got {value!r}")
        return [parse_text(flag, str(one)) for one in value]
    if flag.kind == "json" and isinstance(value, dict | list):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{flag.name}: expected {flag.kind}, got {value!r}")
    return parse_text(flag, str(value))


def parse_variable(flag: Flag, text: str) -> FlagValue:
    """A flag's value from an environment variable: switches are true or false, lists are separated by blanks.

    Raises:
        ConfigError: `text` is empty or no such value.
    """
    if not text.strip():
        raise ConfigError(f"--{flag.name}: the variable is set but empty; unset it or give it a value")
    if flag.kind == "switch":
        if text.lower() not in {"true", "false", "1", "0"}:
            raise ConfigError(f"--{flag.name}: expected true or false, got {text!r}")
        return text.lower() in {"true", "1"}
    if flag.several:
        return [parse_text(flag, word) for word in text.split()]
    return parse_text(flag, text)


def parse_arguments(tokens: Sequence[str], flags: Mapping[str, Flag]) -> dict[str, FlagValue]:
    """A command line as values by flag name, in vLLM's own syntax.

    Understands `--name value`, `--name=value`, `--no-name`, `--under_scores` and several values after one flag. Short
    names (`-tp 2`, `-O3`) and dotted keys of JSON flags (`--compilation-config.mode 0`) are understood too. A repeated
    flag keeps its last value.

    Raises:
        ConfigError: an unknown flag (names the nearest), a missing or malformed value, a positional argument.
    """
    shorts = {short: flag for flag in flags.values() for short in flag.short}
    values: dict[str, FlagValue] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        head, equals, inline = token.partition("=")
        if token.startswith("-O") and len(token) > 2:
            head, equals, inline = "--optimization-level", "=", token[2:].removeprefix("=")
        if head in shorts:
            flag, key, negated = shorts[head], "", False
        elif head.startswith("--"):
            dotted, _, key = head[2:].partition(".")
            flag, negated = _look_up(dotted.replace("_", "-"), flags)
        else:
            raise ConfigError(
                f"unexpected argument {token!r}; every argument follows a flag, the model directory --model"
            )
        if flag.kind == "switch":
            if equals:
                raise ConfigError(f"--{flag.name} takes no value; give --{flag.name} or --no-{flag.name}")
            values[flag.name] = not negated
            continue
        texts = [inline] if equals else _take(rest, several=flag.several)
        if not texts:
            raise ConfigError(f"--{flag.name} needs a value")
        if key:
            values[flag.name] = _nested(flag, key, texts[0], values.get(flag.name, {}))
        elif flag.several:
            values[flag.name] = [parse_text(flag, text) for text in texts]
        else:
            values[flag.name] = parse_text(flag, texts[0])
    return values


def _look_up(name: str, flags: Mapping[str, Flag]) -> tuple[Flag, bool]:
    if name in flags:
        return flags[name], False
    positive = name.removeprefix("no-")
    if positive in flags and flags[positive].negatable:
        return flags[positive], True
    raise ConfigError(unknown_name("flag", f"--{name}", [f"--{known}" for known in flags]))


def _take(rest: list[str], *, several: bool) -> list[str]:
    taken: list[str] = []
    while rest and (several or not taken) and not rest[0].startswith("--"):
        taken.append(rest.pop(0))
    return taken


def _nested(flag: Flag, key: str, text: str, present: FlagValue) -> dict[str, Any]:
    """A JSON flag's value with one dotted key set in it."""
    if flag.kind != "json" or not isinstance(present, dict):
        raise ConfigError(f"--{flag.name}.{key}: only flags that take a JSON object have dotted keys")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    head, _, tail = key.partition(".")
    return {**present, head: _nested(flag, tail, text, present.get(head, {})) if tail else value}


def render(flag: Flag, value: FlagValue) -> list[str]:
    """A flag as the engine's command line has it; nothing for a switch that is off and has no `--no-` form."""
    if isinstance(value, bool):
        if value:
            return [f"--{flag.name}"]
        return [f"--no-{flag.name}"] if flag.negatable else []
    if flag.kind == "json":
        return [f"--{flag.name}", json.dumps(value, separators=(",", ":"))]
    if isinstance(value, list):
        return [f"--{flag.name}", *(str(one) for one in value)]
    text = str(value)
    return [f"--{flag.name}={text}"] if text.startswith("-") else [f"--{flag.name}", text]
