"""docker-compose.ray.yml agrees with the Dockerfile, with Ray and with the program. Needs no Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cluster.file import read_cluster

from .conftest import ROOT, SERVED_NAME
from .test_files import DOCKERFILE, VERSION

TEXT = (ROOT / "docker-compose.ray.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REQUIRED = {"HEAD_IP": "10.0.0.1", "NODE_IP": "10.0.0.2", "INTERFACE": "eth1", "MODEL_DIR": "/models"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_a_ray_image_that_is_built(name: str) -> None:
    service = SERVICES[name]
    kind = service["build"]["args"]["RAY_ON"]
    suffix = {"gpu": "cu128", "cpu": "cpu"}[kind]
    assert service["image"] == f"${{{kind.upper()}_RAY_IMAGE:-voltserve:{VERSION}-vllm0.28.0-{suffix}-ray}}"
    assert service["build"]["target"] == "ray"
    assert f" AS {kind}\n" in DOCKERFILE


def test_one_stage_adds_ray_to_either_image() -> None:
    assert "\nARG RAY_ON=gpu\n" in DOCKERFILE.split("\nFROM ")[0]  # before the first stage, or FROM does not know it
    assert DOCKERFILE.count("\nFROM ${RAY_ON} AS ray\n") == 1
    assert "ray.lock" in DOCKERFILE.split(" AS ray\n")[1].split("\nFROM ")[0]
    assert DOCKERFILE.count("-r /src/requirements/ray.lock") == 1


@pytest.mark.parametrize(
    ("kind", "tag", "arguments"),
    [
        ("gpu", "cu128", ["--target", "gpu"]),
        ("cpu", "cpu", ["--target", "cpu"]),
        ("gpu-ray", "cu128-ray", ["--target", "ray", "--build-arg", "RAY_ON=gpu"]),
        ("cpu-ray", "cpu-ray", ["--target", "ray", "--build-arg", "RAY_ON=cpu"]),
    ],
)
def test_docker_build_sh_builds_and_tags_each_kind(tmp_path: Path, kind: str, tag: str, arguments: list[str]) -> None:
    """A stand-in for `docker` prints what it is asked for."""
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command: list[str | Path] = [ROOT / "scripts/docker_build.sh", kind]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"voltserve:{VERSION}-vllm[\d.]+-{tag}\n", done.stdout)
    assert done.stderr.splitlines()[: 1 + len(arguments)] == ["build", *arguments]


def test_each_profile_of_a_head_has_ray_s_head_and_one_gateway() -> None:
    profiles: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        profiles.setdefault(service["profiles"][0], set()).add(name)
    assert profiles == {
        "head": {"head", "deploy"}, "worker": {"worker"},
        "cpu-head": {"cpu-head", "cpu-deploy"}, "cpu-worker": {"cpu-worker"},
    }  # fmt: skip


def test_a_worker_needs_to_be_told_what_nothing_can_guess() -> None:
    assert set(re.findall(r"\$\{(\w+):\?", TEXT)) == set(REQUIRED)


def test_the_default_cluster_file_serves_the_mounted_model() -> None:
    source = re.search(r"CLUSTER_FILE:-(\S+?)\}", TEXT)
    assert source
    (model,) = read_cluster(ROOT / source[1]).models
    assert model.flags == {"model": SERVED_NAME}
    mount = SERVICES["worker"]["volumes"][0]
    assert (mount["target"], mount["read_only"]) == (SERVED_NAME, True)


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is absent")
@pytest.mark.parametrize("profile", ["head", "worker", "cpu-head", "cpu-worker"])
def test_compose_takes_the_file(profile: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "docker-compose.ray.yml", tmp_path)
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in REQUIRED.items()))
    command = ["docker-compose", "-f", "docker-compose.ray.yml", "--profile", profile, "config", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
