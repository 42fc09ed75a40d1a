"""A local hub with a small model on it, and commands against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.hub import http
from tests.fakes.hub import Hub, Repository, local_hub
from tests.quant.checkpoints import write_model

NAME = "owner/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that holds `owner/model`, and an environment that knows no other."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(http, "WAITS", (0.0, 0.0, 0.0))
    with local_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        served.repositories[NAME] = Repository.of(write_model(tmp_path / "on-the-hub"))
        yield served


def run(*arguments: object) -> tuple[int, str]:
    """A command's exit code and all that it printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def contents(directory: Path) -> dict[str, bytes]:
    """The visible files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if not path.name.startswith(".")}


def model_on(hub: Hub) -> dict[str, bytes]:
    """The files of the model on the hub."""
    return hub.repositories[NAME].files


def without_manifest(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != "SHA256SUMS"}
