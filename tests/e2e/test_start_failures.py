"""The real engine's failures: a start that cannot work ends at once, and a crash reveals nothing that clients wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from server.diagnosis import Ending, diagnose
from tests.e2e.conftest import MODEL, ROOT, START_LIMIT_S, Service, free_port, serving
from tests.e2e.test_main_job import engine_core
from tests.faults.test_client_words import CANARY, MISLEADING, send, told
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e


def ended(model: Path | str, log: Path, *flags: str) -> tuple[int, str, int]:
    """The exit code of a serve that cannot work, what it wrote, and how often it started an engine."""
    command = [str(Path(sys.executable).with_name("voltserve")), "serve", "--model", str(model), "--port"]
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, str(free_port()), *flags],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=START_LIMIT_S,
        )
    text = log.read_text()
    return done.returncode, text, text.count("the model is being loaded")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the model, to be broken."""
    return Path(shutil.copytree(ROOT / MODEL, tmp_path / "model"))


def change(model: Path, name: str, where: slice, value: float) -> None:
    file = model / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    changed = tensors[name].float()
    changed.view(-1)[where] = value
    tensors[name] = changed.to(tensors[name].dtype)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.input_layernorm.weight", "model.layers.7.mlp.down_proj.weight_scale"],
    ids=["norm", "scale"],
)
def test_weights_that_are_no_numbers_end_the_first_start_and_are_named(tmp_path: Path, broken: Path, name: str) -> None:
    change(broken, name, slice(5, 6), torch.nan)
    code, text, starts = ended(broken, tmp_path / "log")
    assert (code, starts) == (65, 1), text[-4000:]
    assert f"{name} (model.safetensors): expected finite values, got nan" in text
    assert "what='the model computes with NaN or infinity'" in text


def test_values_that_become_infinite_on_their_way_end_the_first_start(tmp_path: Path, broken: Path) -> None:
    # A divisor: its reciprocal is finite, but any product with the reciprocal is not.
    change(broken, "model.layers.7.mlp.down_proj.weight_global_scale", slice(None), 1e-37)
    code, text, starts = ended(broken, tmp_path / "log")
    assert (code, starts) == (65, 1), text[-4000:]
    assert "came up, but does not work: the model's outputs are not finite" in text


def test_a_parser_that_does_not_fit_the_tokenizer_ends_the_first_start(tmp_path: Path) -> None:
    code, text, starts = ended(MODEL, tmp_path / "log", "--reasoning-parser", "deepseek_r1")
    assert (code, starts) == (78, 1), text[-4000:]
    assert "a parser that does not fit" in text


def test_a_shard_that_is_cut_off_is_named_before_an_engine_is_started(tmp_path: Path, broken: Path) -> None:
    file = broken / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    code, text, starts = ended(broken, tmp_path / "log")
    assert (code, starts) == (65, 0)
    assert (
        f"{broken} cannot be served on a CPU: {file.name}: expected a file of {size} bytes, got {size - 1000}" in text
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a JSON log, in which the engine's lines are whole."""
    with serving(tmp_path_factory.mktemp("served") / "log", "--log-format", "json") as started:
        yield started


def test_nothing_in_the_log_of_a_start_that_works_is_an_error_of_the_catalogue(served: Service) -> None:
    lines = [json.loads(line)["event"] for line in served.log.read_text().splitlines() if line.startswith("{")]
    assert any(line.startswith("(EngineCore ") for line in lines), lines
    assert diagnose(Ending.of("exited with code 1", lines)) is None


def test_a_crash_tells_nothing_that_clients_wrote_and_is_known_for_what_it_is(served: Service) -> None:
    texts = [f"{between}{text} {CANARY}" for text, between in zip(MISLEADING, ("", "x\n", "x\r") * 2, strict=True)]
    for text in texts:
        send(served.url, MODEL, text)
    assert CANARY in served.log.read_text(), "vLLM has not printed it: this test could not fail"
    assert CANARY not in told(served.url)
    engine_core(served).send_signal(signal.SIGKILL)

    def diagnosed() -> dict[str, Any] | None:
        body: dict[str, Any] = httpx.get(f"{served.url}/health", timeout=5).json()
        return body if body["diagnosis"] else None

    body = wait_until(diagnosed, 60, "a diagnosis")
    assert body["diagnosis"]["id"] == "killed-for-memory"
    assert body["last_exit"].endswith(" | the engine died: EngineCore was killed by SIGKILL"), body["last_exit"]
    assert CANARY not in told(served.url)
    served.wait_ready()
    assert CANARY not in told(served.url)
