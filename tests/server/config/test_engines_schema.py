"""docs/schemas/engines.json and docs/engines.md are current, and the schema judges as the program does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import ValidationError

from server.config.engines_file import EnginesFile, checked_flags
from server.config.engines_schema import SCHEMA, flag_names, render, schema
from server.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
VALIDATOR = Draft202012Validator(schema())


def test_the_file_in_the_repository_is_current() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == render(), "run: python -m server.config.engines_schema"


def keys(node: dict[str, Any], where: str = "") -> dict[str, tuple[str, bool]]:
    """Each key by its path, with its description and whether it must be there."""
    node = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
    found = {}
    for name, value in node.get("properties", {}).items():
        path = f"{where}{name}"
        found[path] = (value.get("description", ""), name in node.get("required", ()))
        if "$ref" in value.get("items", {}):
            found |= keys(value["items"], f"{path}[].")
    return found


def test_the_page_has_a_row_for_every_key_and_says_which_must_be_there() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    told = {row[0].strip("|` "): row[2] == "required" for row in rows}
    assert told == {path: required for path, (_, required) in keys(schema()).items()}
    assert all(about for about, _ in keys(schema()).values())


def test_every_example_is_valid_for_both() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert examples
    for text in (*examples, (ROOT / "configs/compose/engines.yaml").read_text(encoding="utf-8")):
        content = yaml.safe_load(text)
        VALIDATOR.validate(content)
        for model in EnginesFile.model_validate(content).models:
            assert checked_flags("here", model.flags, "serve")


GOOD: dict[str, Any] = {"name": "m", "flags": {"model": "/m"}}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"schema": 2, "models": [GOOD]},
        {"schema": 1, "models": []},
        {"schema": 1, "models": [GOOD], "extra": 1},
        {"schema": 1, "models": [{**GOOD, "name": "a b"}]},
        {"schema": 1, "models": [{"name": "m"}]},
        {"schema": 1, "models": [{**GOOD, "replicas": []}]},
        {"schema": 1, "models": [{**GOOD, "replicas": [{"gpus": []}]}]},
        {"schema": 1, "models": [{**GOOD, "replicas": [{"gpus": [-1]}]}]},
        {"schema": 1, "models": [{**GOOD, "replicas": [{"gpu": [0]}]}]},
    ],
)
def test_what_the_program_refuses_the_schema_refuses(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EnginesFile.model_validate(content)
    assert not VALIDATOR.is_valid(content)


@pytest.mark.parametrize("name", ["port", "keys-file", "nonesuch", "uds"])
def test_flags_that_no_model_has_are_refused(name: str) -> None:
    content = {"schema": 1, "models": [{"name": "m", "flags": {"model": "/m", name: "x"}}]}
    assert not VALIDATOR.is_valid(content)
    assert name not in flag_names()
    if name != "uds":  # refused where the engine's arguments are made
        with pytest.raises(ConfigError):
            checked_flags("here", {name: "x"}, "serve")


def test_the_schema_is_sound() -> None:
    Draft202012Validator.check_schema(json.loads(render()))
