"""docs/schemas/*.json and docs/engines.md are current, and each schema judges as the program does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from server.cluster.file import ClusterFile
from server.config.engines_file import EnginesFile, checked_flags
from server.config.presets import PRESETS_FOLDER, Preset
from server.errors import ConfigError
from server.schemas import SCHEMAS, engines_schema, model_flags, path_of, render

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
VALIDATORS = {name: Draft202012Validator(made()) for name, made in SCHEMAS.items()}
VALIDATOR = VALIDATORS["engines"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_files_in_the_repository_are_current(name: str) -> None:
    assert path_of(name).read_text(encoding="utf-8") == render(name), "run: python -m server.schemas"


def keys(node: dict[str, Any], where: str = "") -> dict[str, tuple[str, bool]]:
    """Each key by its path, with its description and whether it must be there."""
    node = engines_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
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
    assert told == {path: required for path, (_, required) in keys(engines_schema()).items()}
    assert all(about for about, _ in keys(engines_schema()).values())


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
        {"schema": 1, "models": [{**GOOD, "idle_timeout": 5}]},
        {"schema": 1, "models": [{**GOOD, "on_demand": True, "min_residence": -1}]},
        {"schema": 1, "models": [{**GOOD, "on_demand": True, "pinned": True, "idle_timeout": 5}]},
        {"schema": 1, "models": [{**GOOD, "on_demand": True, "replicas": [{"gpus": [0]}, {"gpus": [1]}]}]},
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
    assert name not in model_flags()
    if name != "uds":  # refused where the engine's arguments are made
        with pytest.raises(ConfigError):
            checked_flags("here", {name: "x"}, "serve")


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_are_sound(name: str) -> None:
    Draft202012Validator.check_schema(json.loads(render(name)))


def shipped(name: str) -> list[Path]:
    """The files in the repository that name this schema for editors."""
    files = [*ROOT.glob("*.yml"), *ROOT.glob("configs/**/*.yaml")]
    line = re.compile(rf"^# yaml-language-server: \$schema=(\S+/{name}\.json)$", re.MULTILINE)
    found = [(path, line.search(path.read_text(encoding="utf-8"))) for path in files]
    for path, match in found:
        assert match is None or (path.parent / match[1]).resolve() == path_of(name)
    return [path for path, match in found if match]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_shipped_file_names_its_schema_and_is_valid(name: str) -> None:
    paths = shipped(name)
    assert paths
    if name == "presets":
        assert set(paths) == set(PRESETS_FOLDER.glob("*.yaml"))
    for path in paths:
        VALIDATORS[name].validate(yaml.safe_load(path.read_text(encoding="utf-8")))


PRESET: dict[str, Any] = {"schema": 1, "name": "p", "description": "for a test", "match": None}
VARIANT: dict[str, Any] = {"description": "for a test"}


@pytest.mark.parametrize(
    ("changes", "by_model"),
    [
        ({"engin": {}}, True),
        ({"schema": 2}, True),
        ({"match": {"count": 1}}, True),
        ({"engine": {"dtyp": "float16"}}, False),
        ({"limits": {"max-num-seqs": {"value": 1, "provenance": "guessed", "source": "x"}}}, True),
        ({"env": {"A": {"libary": "x"}}}, True),
        ({"variants": {"graphs": {}}}, True),
        ({"variants": {"Graphs!": VARIANT}}, True),
        ({"variants": {"graphs": {**VARIANT, "engine": {"dtyp": "float16"}}}}, False),
    ],
)
def test_a_wrong_preset_is_refused_by_schema_and_program(changes: dict[str, Any], by_model: bool) -> None:
    VALIDATORS["presets"].validate(PRESET)
    content = {**PRESET, **changes}
    assert not VALIDATORS["presets"].is_valid(content)
    if by_model:
        with pytest.raises(ValidationError):
            Preset.model_validate(content)


def test_a_preset_file_without_match_must_extend_another() -> None:
    content = {name: value for name, value in PRESET.items() if name != "match"}
    assert not VALIDATORS["presets"].is_valid(content)
    assert VALIDATORS["presets"].is_valid({**content, "extends": "other"})


CLUSTER: dict[str, Any] = {"name": "m", "flags": {"model": "/m"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": {}},
        {"name": "a b"},
        {"replica": 2},
        {"replicas": 0},
        {"replicas": 1, "autoscaling": {"max": 2, "requests_per_replica": 4}},
        {"autoscaling": {"max": 2}},
        {"per_node": 101},
    ],
)
def test_a_wrong_cluster_file_is_refused_by_schema_and_program(changes: dict[str, Any]) -> None:
    VALIDATORS["cluster"].validate({"schema": 1, "models": [CLUSTER]})
    content = {"schema": 1, "models": [{**CLUSTER, **changes}]}
    assert not VALIDATORS["cluster"].is_valid(content)
    with pytest.raises(ValidationError):
        ClusterFile.model_validate(content)
