import re
from pathlib import Path

import pytest

from server.config.check import COMPOSE, Outdated, check_file
from server.config.presets import PRESETS_FOLDER
from server.errors import UserError

ROOT = Path(__file__).parents[3]


def checked(tmp_path: Path, name: str, text: str) -> list[Outdated]:
    file = tmp_path / name
    file.write_text(text)
    return check_file(file, "0.2.0")


def test_the_files_of_this_version_are_taken_as_they_are() -> None:
    here = [ROOT / ".env.example", ROOT / "configs/compose/engines.yaml", *sorted(PRESETS_FOLDER.glob("*.yaml"))]
    version = re.search(r"voltserve:([\d.]+)-", (ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert version is not None
    for path in here:
        assert check_file(path, version[1]) == [], path


def test_every_example_of_env_is_taken_also_once_it_is_in_use(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=[A-Z_]+=)", "", (ROOT / ".env.example").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [one for one in checked(tmp_path, ".env", text) if not one.note] == []


def test_compose_s_variables_are_those_of_its_files() -> None:
    files = ("docker-compose.yml", "docker-compose.ray.yml")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    assert {*re.findall(r"\$\{([A-Z_]+)", text), "COMPOSE_PROFILES"} == COMPOSE


ENV = """
# a comment
export MODEL_DIR='/models/a b'
CUDA_VISIBLE_DEVICES=0,1
MY_OWN=1
GPU_IMAGE=voltserve:0.2.0-vllm0.19.1-cu128 # kept
VOLTSERVE_MAX_MODEL_LEN="8192"
VOLTSERVE_PRESET=v100x2-16g-pcie-graphs
VOLTSERVE_MODEL=/models/quasar-nvfp4
"""


@pytest.mark.parametrize(
    ("line", "setting", "what"),
    [
        ("VOLTSERVE_MAX_MODEL_LENGTH=1", "VOLTSERVE_MAX_MODEL_LENGTH", "did you mean VOLTSERVE_MAX_MODEL_LEN"),
        ("VOLTSERVE_MAX_MODEL_LEN=many", "VOLTSERVE_MAX_MODEL_LEN", "expected a count"),
        ("VOLTSERVE_PORT=99999", "VOLTSERVE_PORT", "--port: Input should be less than or equal to 65535"),
        ("VOLTSERVE_LOG_FORMAT=xml", "VOLTSERVE_LOG_FORMAT", "--log-format: Input should be 'text' or 'json'"),
        ("VOLTSERVE_PRESET=v100x3", "VOLTSERVE_PRESET", "unknown preset 'v100x3'"),
        ("VOLTSERVE_UDS=/x", "VOLTSERVE_UDS", "is not for users any more: the engine's socket is private"),
        ("VOLTSERVE_ENFORCE_EAGER=", "VOLTSERVE_ENFORCE_EAGER", "set but empty"),
        ("MODELDIR=/m", "MODELDIR", "did you mean MODEL_DIR?"),
        ("just words", "just words", "expected NAME=VALUE"),
    ],
)
def test_what_an_env_has_that_is_no_longer_taken_is_named_with_its_line(
    tmp_path: Path, line: str, setting: str, what: str
) -> None:
    assert checked(tmp_path, ".env", ENV) == []
    (one,) = checked(tmp_path, ".env", ENV + line)
    assert (one.setting, one.where, one.note) == (setting, f"{tmp_path}/.env:10", False)
    assert what in one.what


def test_what_does_no_harm_is_a_note(tmp_path: Path) -> None:
    found = checked(tmp_path, ".env", "GPU_IMAGE=voltserve:0.1.0-x\nVOLTSERVE_DISABLE_LOG_REQUESTS=true\n")
    assert [one.note for one in found] == [True, True]
    assert found[0].what == "names the image of 0.1.0; this is 0.2.0"
    assert "requests are not logged" in found[1].what


ENGINES = """
schema: 1
models:
  - name: a
    flags: {model: /m/a, max-modle-len: 1, port: 1, uds: x, disable-log-requests: true}
    replica: []
  - name: b
    flags: {model: /m/b}
    idle_timeout: 5
"""


def test_all_of_an_engines_file_that_is_no_longer_taken_is_listed(tmp_path: Path) -> None:
    found = {one.setting: one for one in checked(tmp_path, "engines.yaml", ENGINES)}
    assert found.keys() == {"max-modle-len", "port", "uds", "disable-log-requests", "replica", "1"}
    assert "did you mean max-model-len" in found["max-modle-len"].what
    assert "port is the gateway's" in found["port"].what
    assert (found["replica"].where, found["replica"].what) == (f"{tmp_path}/engines.yaml: models.0", "no such key")
    assert "idle_timeout is for models with on_demand: true" in found["1"].what
    assert [name for name, one in found.items() if one.note] == ["disable-log-requests"]


PRESET = """
schema: 1
name: mine
description: of another version
match: {count: 1, capability: "7.0", memory_gib: 16, nvlink: null}
engine: {dtype: float16, gone-flag: 1, uds: x}
limits: {max-model-len: {value: many, provenance: computed, source: x}}
"""


def test_all_flags_of_a_preset_that_are_no_longer_taken_are_listed(tmp_path: Path) -> None:
    found = {one.setting: one.what for one in checked(tmp_path, "mine.yaml", PRESET)}
    assert found.keys() == {"gone-flag", "uds", "max-model-len"}
    (one,) = checked(tmp_path, "mine.yaml", "schema: 1\nname: mine\nengine: {}\nmatches: {}\n")
    assert (one.setting, "unknown key 'matches'; did you mean match?" in one.what) == ("preset", True)


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "["), ("a.yaml", "x: 1"), ("a.yml", "- 1")])
def test_a_file_that_is_none_of_them_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError, match="--check-config"):
        checked(tmp_path, name, text)
