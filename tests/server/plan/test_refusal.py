"""`serve` and `explain` on machines whose GPUs the model does not fit."""

from pathlib import Path

import pytest

from lookalikes.public_models import dense
from server.config.devices import Device, Devices
from server.config.settings import Config, load_config
from server.errors import PreflightError
from server.run import preflight
from server.run.explain import explain

from .test_model import write


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own decisions are of no matter here, and asking for them starts a process; nor is its build."""
    monkeypatch.setattr("server.config.settings.engine_is_cpu_build", lambda: False)
    monkeypatch.setattr("server.run.servable.engine_decisions", lambda config: ((), None))
    monkeypatch.setattr("server.run.explain.engine_decisions", lambda config: ((), None))


def config(model: Path, *flags: str, gpus: int = 2) -> Config:
    cards = tuple(Device("Tesla V100-PCIE-16GB", f"GPU-{index}", "7.0", 16, nvlink=False) for index in range(gpus))
    return load_config(["--model", str(model), *flags], {}, lambda: Devices(cards))


def on_v100s(model: Path, *flags: str) -> Config:
    return config(model, "--preset", "v100x2-16g-pcie", *flags)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    shape, entries = dense("32B")
    return write(tmp_path, shape, {"model.safetensors": entries}, index=False)


def test_a_model_that_fits_is_told_with_its_tokens(qwen: Path) -> None:
    (decision,) = preflight.check(on_v100s(qwen))
    assert decision.choice == "33,424 tokens of cache"
    assert vars(decision) in explain(on_v100s(qwen))["decisions"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "40960"], r"needs 5\.00 GiB of cache .* lower --max-model-len to 33408"),
        (["-tp", "1"], r"does not fit with TP=1: 20\.01 GiB are needed of 14\.20 GiB.*--tensor-parallel-size"),
        (["--gpu-memory-utilization", "0.97"], r"lower it to 0\.95"),
        (["--max-model-len", "50000"], "beyond the model's 40960 positions"),
    ],
)
def test_serve_refuses_what_cannot_fit_with_numbers_and_what_to_lower(
    qwen: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(PreflightError, match=message):
        preflight.check(on_v100s(qwen, *flags))
    assert "does not fit" in explain(on_v100s(qwen, *flags))["problem"]


def test_a_misfit_can_be_started_all_the_same(qwen: Path) -> None:
    (decision,) = preflight.check(on_v100s(qwen, "--max-model-len", "40960", "--memory-plan", "warn"))
    assert decision.choice == "started although it does not fit"
    assert "lower --max-model-len" in decision.reason


def test_a_model_that_is_not_planned_is_served_and_told(tmp_path: Path) -> None:
    shape, entries = dense("8B", kv_lora_rank=512)
    (decision,) = preflight.check(on_v100s(write(tmp_path, shape, {"model.safetensors": entries}, index=False)))
    assert decision.choice == "none"
    assert "multi-head latent attention" in decision.reason


def test_a_broken_shard_is_refused_by_name(qwen: Path) -> None:
    with (qwen / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(PreflightError, match=r"model\.safetensors"):
        preflight.check(on_v100s(qwen))
