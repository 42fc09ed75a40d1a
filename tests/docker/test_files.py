"""Dockerfile, docker-compose.yml and .env.example agree with each other and with the program. Needs no Docker."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from server.config.devices import Device, Devices
from server.config.engines_file import load_configs
from server.config.render import is_inherited
from server.config.settings import Settings, all_flags, variable_name

from .conftest import ROOT, SERVED_NAME

COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ENV_EXAMPLE = dict(re.findall(r"^#?([A-Z][A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
INTERPOLATED = dict(re.findall(r"\$\{(\w+):[-?]([^}]*)\}", COMPOSE_TEXT))
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def test_every_variable_of_the_compose_file_is_explained_with_its_default() -> None:
    assert INTERPOLATED.keys() <= ENV_EXAMPLE.keys()
    defaults = {name: default for name, default in INTERPOLATED.items() if name != "MODEL_DIR"}
    assert {name: ENV_EXAMPLE[name] for name in defaults} == defaults


def test_every_other_variable_reaches_the_server_or_the_engine() -> None:
    ours = {variable_name(name) for name in all_flags()}
    for name in ENV_EXAMPLE.keys() - INTERPOLATED.keys() - {"COMPOSE_PROFILES", "HF_ENDPOINT"}:
        assert name in ours or is_inherited(name), name


def test_no_variable_of_the_compose_file_is_taken_for_a_setting() -> None:
    assert not [name for name in INTERPOLATED if name.startswith("VOLTSERVE_")]


def test_the_model_directory_has_no_default() -> None:
    assert "${MODEL_DIR:?" in COMPOSE_TEXT
    assert ENV_EXAMPLE["MODEL_DIR"] == ""
    for service in ("gpu", "multi", "cpu"):
        mount = COMPOSE["services"][service]["volumes"][0]
        assert (mount["target"], mount["read_only"]) == (SERVED_NAME, True)


@pytest.mark.parametrize(("service", "suffix"), [("gpu", "cu128"), ("multi", "cu128"), ("cpu", "cpu")])
def test_the_images_are_those_that_docker_build_sh_tags(service: str, suffix: str) -> None:
    entry = COMPOSE["services"][service]
    assert entry["image"] == "${%s_IMAGE:-voltserve:%s-vllm0.28.0-%s}" % (  # noqa: UP031  # braces are Compose's
        "CPU" if suffix == "cpu" else "GPU", VERSION, suffix
    )  # fmt: skip
    assert f"\nFROM {entry['build']['target']}-environment AS {entry['build']['target']}\n" in DOCKERFILE


def test_fetching_has_the_rules_of_serving_and_a_folder_to_write() -> None:
    fetch, serve = COMPOSE["services"]["fetch"], COMPOSE["services"]["gpu"]
    for rule in ("read_only", "tmpfs", "cap_drop", "security_opt", "env_file"):
        assert fetch[rule] == serve[rule], rule
    assert "user" not in fetch  # the image's, as for serving
    assert "ports" not in fetch
    assert fetch["volumes"] == ["${MODELS_DIR:-./models}:/models", "cache:/var/cache/voltserve"]
    assert fetch["profiles"] == ["fetch"]  # `up` starts it in no case
    assert fetch["image"].partition("_")[2] == serve["image"].partition("_")[2]


def test_what_is_fetched_by_itself_is_what_is_served_by_itself() -> None:
    command = COMPOSE["services"]["fetch"]["command"]
    assert command[3] == "/models/${FETCH_NAME:-" + SERVED_NAME.rpartition("/")[2] + "}"


def test_times_follow_the_settings() -> None:
    of = {name: field.default for name, field in Settings.model_fields.items()}
    assert f"--start-period={of['start_timeout']:.0f}s" in DOCKERFILE
    grace = int(COMPOSE["services"]["gpu"]["stop_grace_period"].removesuffix("s"))
    assert grace > of["drain_timeout"] + of["stop_timeout"]


def test_profile_multi_starts_the_model_once_a_card() -> None:
    cards = tuple(Device("Tesla V100-PCIE-16GB", f"GPU-{n}", "7.0", 16, nvlink=False) for n in (1, 2))
    configs = load_configs(["--engines", str(ROOT / "configs/compose/engines.yaml")], {}, lambda: Devices(cards))
    assert [(one.model, one.devices.gpus) for one in configs] == [(SERVED_NAME, (card,)) for card in cards]


def test_the_build_context_holds_what_the_stages_copy() -> None:
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for source in re.findall(r"source=((?:scripts|requirements)[^,\s]*)", DOCKERFILE):
        assert source in allowed or source.split("/")[0] in allowed, source
    for copied in re.findall(r"^COPY (scripts/.*) scripts/$", DOCKERFILE, re.MULTILINE):
        assert set(copied.split()) <= allowed
    assert all((ROOT / path).exists() for path in allowed)
