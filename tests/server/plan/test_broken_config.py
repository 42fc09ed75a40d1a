"""A config.json without its number of positions is a damaged model: 65 from `plan` and from serve's check."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.config.devices import Device, Devices
from server.config.settings import load_config
from server.errors import ModelRefusedError
from server.run import preflight
from tests.quant.checkpoints import write_model

FLAGS = ("--preset", "v100x1-16g")
CARD = Devices((Device("a card", "GPU-1", "7.0", 16, nvlink=False),))


@pytest.fixture(params=[None, 0, -1])
def broken(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model whose config.json does not say how many positions it has."""
    model = write_model(tmp_path / "model")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": request.param}))
    return model


def test_plan_refuses_it_as_a_model(broken: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(broken), *FLAGS])
    assert done.exit_code == 65, done.output
    assert "max_position_embeddings: expected a positive number, got " in done.output
    assert "Restore the model's files from its source" in done.output


def test_serve_refuses_it_as_a_model(broken: Path) -> None:
    with pytest.raises(ModelRefusedError, match="max_position_embeddings: expected a positive number"):
        preflight.check_memory(load_config(["--model", str(broken), *FLAGS], {}, lambda: CARD))
