"""The project as a user has it after `cp .env.example .env`, and Docker through its command line.

What needs a Docker engine is collected only where scripts/test_docker.sh says which image it built.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/smollm2-nvfp4"
SERVED_NAME = "/models/quasar-nvfp4"
START_LIMIT_S = 300  # bounds on hangs, not checks of speed
LIMIT_S = 60

IMAGE = os.environ.get("VOLTSERVE_TEST_IMAGE", "")
collect_ignore = [] if IMAGE else ["test_compose_up.py", "test_image.py"]


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        pytest.fail(f"docker {shlex.join(arguments)}: exit code {done.returncode}: {done.stderr}")
    return done


def inspect(container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", container).stdout)[0]
    return found


@dataclass(frozen=True)
class Project:
    """A folder with docker-compose.yml and .env, and the ports that .env names."""

    folder: Path
    port: int
    prometheus_port: int

    def compose(self, *arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        command = [*shlex.split(os.environ.get("COMPOSE", "docker-compose")), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, env={**os.environ, **env}
        )
        if check and done.returncode:
            pytest.fail(f"{shlex.join(command)}: exit code {done.returncode}: {done.stderr}")
        return done

    def container(self, service: str) -> str:
        return self.compose("ps", "-q", service).stdout.strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> dict[str, Any]:
        body: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=LIMIT_S).json()
        return body

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The answer of Prometheus to one query."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/query"
        reply = httpx.get(url, params={"query": expression}, timeout=LIMIT_S)
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    ports = free_port(), free_port()
    # Compose names containers and volumes after the folder.
    folder = tmp_path_factory.mktemp(f"voltserve-test-{ports[0]}", numbered=False)
    shutil.copy(ROOT / "docker-compose.yml", folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    changes = {
        "MODEL_DIR=": f"MODEL_DIR={MODEL}",
        "COMPOSE_PROFILES=gpu": "COMPOSE_PROFILES=cpu,monitoring",
        "#PORT=8000": f"PORT={ports[0]}",
        "#PROMETHEUS_PORT=9090": f"PROMETHEUS_PORT={ports[1]}",
        "#PROMETHEUS_IMAGE=prom/prometheus:v2.53.5": "PROMETHEUS_IMAGE=voltserve-test-prometheus",
        "#VOLTSERVE_MAX_NUM_SEQS=32": "VOLTSERVE_MAX_NUM_SEQS=4",
    }
    text = (ROOT / ".env.example").read_text()
    for old, new in changes.items():
        assert f"\n{old}\n" in text, f".env.example has no line {old!r}"
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    (folder / ".env").write_text(text)
    return Project(folder, *ports)


@pytest.fixture(scope="session")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's Prometheus, as an image that starts like the official one, which cannot be pulled everywhere."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy("/usr/bin/prometheus", folder)
    (folder / "Dockerfile").write_text(
        f'FROM {os.environ["VOLTSERVE_TEST_BASE"]}\nCOPY prometheus /bin/prometheus\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    tag = "voltserve-test-prometheus"
    docker("build", "--quiet", "--tag", tag, str(folder))
    yield tag
    docker("rmi", "--force", tag)


@pytest.fixture(scope="session")
def up(project: Project, prometheus_image: str) -> Iterator[Project]:
    """`compose up` of engine and Prometheus. Grafana is left out: there is no package of it to stand in."""
    project.compose("up", "-d", "cpu", "prometheus")
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "10", check=False)
