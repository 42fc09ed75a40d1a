#!/usr/bin/env python3
"""Writes configs/engine_flags.json: the flags of the installed vLLM's OpenAI server, read from its own parser.

`--check` writes nothing and fails if the file is not what would be written. Imports vLLM (about ten seconds).
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "configs" / "engine_flags.json"


def accepts(convert: Callable[[str], Any], text: str) -> bool:
    """Whether vLLM's converter for a flag's value takes `text`."""
    try:
        convert(text)
    except Exception:  # converters raise whatever their dataclass, json or int() raises
        return False
    return True


def value_kind(convert: Callable[[str], Any] | None) -> str:
    """A converter's kind by what it accepts: text, json, size (4096 or 4k), auto_size (also auto), number, integer."""
    if convert is None or accepts(convert, "a word"):
        return "text"
    if accepts(convert, "{}"):
        return "json"
    if accepts(convert, "4k"):
        return "auto_size" if accepts(convert, "auto") else "size"
    if accepts(convert, "0.5"):
        return "number"
    if accepts(convert, "1"):
        return "integer"
    raise SystemExit(f"{convert}: no kind of value fits this converter; teach scripts/engine_flags.py about it")


def describe(action: argparse.Action) -> dict[str, Any]:
    """One flag as data: kind of value, whether it takes several, its choices, short names, and a negated form."""
    flag: dict[str, Any] = {}
    if action.nargs == 0:
        flag["kind"] = "switch"
    else:
        flag["kind"] = value_kind(action.type if callable(action.type) else None)
    if action.nargs == "+":
        flag["several"] = True
    if action.choices is not None:
        flag["choices"] = [str(choice) for choice in action.choices]
    if short := [option for option in action.option_strings if not option.startswith("--")]:
        flag["short"] = short
    if any(option.startswith("--no-") for option in action.option_strings):
        flag["negatable"] = True
    return flag


def render() -> str:
    """The JSON text for the vLLM that is installed."""
    os.environ["VLLM_PLUGINS"] = ""  # stock vLLM's flags, not what plugins add
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # without plugins and GPUs it finds none
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    flags = {}
    for action in parser._actions:
        if not action.option_strings:
            continue
        name = next(option for option in action.option_strings if option.startswith("--"))
        flags[name.removeprefix("--")] = describe(action)
    version = importlib.metadata.version("vllm").partition("+")[0]
    lines = [f"    {json.dumps(name)}: {json.dumps(flag)}" for name, flag in sorted(flags.items())]
    return f'{{\n  "vllm": "{version}",\n  "flags": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def main() -> None:
    """Writes the file, or checks it."""
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{TARGET.name} is not what the installed vLLM's parser says: run scripts/engine_flags.py")


if __name__ == "__main__":
    main()
