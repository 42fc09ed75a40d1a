"""Machines with cards of several kinds, made up in NVML: which of them an engine gets, and why."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pynvml
import pytest

from server.config.devices import find_devices
from server.config.presets import find_preset, load_presets
from server.config.render import render_launch
from server.config.settings import Config, load_config
from server.errors import ConfigError, PreflightError
from server.plan.settings import device_of
from server.run import preflight
from server.units import GIB
from tests.fakes.nvml import invent
from tests.quant.checkpoints import write_model

V16, V32 = ("Tesla V100-PCIE-16GB", "7.0", 16, False), ("Tesla V100-PCIE-32GB", "7.0", 32, False)
S16, S32 = ("Tesla V100-SXM2-16GB", "7.0", 16, True), ("Tesla V100-SXM2-32GB", "7.0", 32, True)
P40, DISPLAY, H200 = ("Tesla P40", "6.1", 24, False), ("Quadro P400", "6.1", 2, False), ("H200", "9.0", 141, True)


def configured(
    model: Path, monkeypatch: pytest.MonkeyPatch, cards: list[tuple[str, str, int, bool]], *flags: str, **environ: str
) -> Config:
    invent(monkeypatch, cards)
    with patch("server.config.settings.engine_is_cpu_build", lambda: False):
        return load_config(["--model", str(model), *flags], {}, lambda: find_devices(environ))


def visible(config: Config, environ: Mapping[str, str] | None = None) -> str:
    return render_launch(config, Path("r"), environ or {}).env["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("cards", "preset", "used"),
    [
        ([V16] * 3, "v100x2-16g-pcie", [0, 1]),
        ([V16, V32], "v100x1-32g", [1]),
        ([V32, V16, V16], "v100x1-32g", [0]),
        ([V32, V16, V16, V16, V16], "v100x4-16g-pcie", [1, 2, 3, 4]),
        ([DISPLAY, V16, V16], "v100x2-16g-pcie", [1, 2]),
        ([V32, DISPLAY], "v100x1-32g", [0]),
        ([P40, V16], "v100x1-16g", [1]),
        ([S32] * 8, "v100x4-32g-sxm2", [0, 1, 2, 3]),
        ([V16] * 6, "v100x4-16g-pcie", [0, 1, 2, 3]),
        ([V16, S16, S16], "v100x2-16g-sxm2", [1, 2]),
        ([S16, V16], "v100x2-16g-pcie", [1, 0]),
    ],
)
def test_the_best_set_of_v100s_serves_and_the_others_idle(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    cards: list[tuple[str, str, int, bool]],
    preset: str,
    used: list[int],
) -> None:
    config = configured(model, monkeypatch, cards)
    assert config.preset == preset
    assert visible(config, {"CUDA_VISIBLE_DEVICES": "7"}) == ",".join(f"GPU-{index}-uuid" for index in used)
    assert render_launch(config, Path("r"), {}).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    told = [one for one in config.decisions if one.what == "cards"]
    idle = [index for index in range(len(cards)) if index not in used]
    assert bool(told) == bool(idle)
    for decision in told:
        assert [f"GPU {index} " in decision.choice for index in range(len(cards))] == [
            index in used for index in range(len(cards))
        ]
        assert all(f"GPU {index} " in decision.reason.partition("idle: ")[2] for index in idle)
    smallest = min(cards[index][2] for index in used)
    memory = device_of(config, find_preset(config.preset, load_presets())).memory_bytes
    assert smallest * GIB * 0.95 < memory <= smallest * GIB


def test_a_preset_that_is_asked_for_takes_its_own_kind_of_card(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(model, monkeypatch, [P40, V16], "--preset", "v100x1-16g")
    assert visible(config) == "GPU-1-uuid"
    assert device_of(config, load_presets()["v100x1-16g"]).memory_bytes < 16 * GIB
    with pytest.raises(PreflightError, match="needs 2 GPUs and 1 were found: Tesla V100"):
        preflight.check_gpus(configured(model, monkeypatch, [P40, V16], "--preset", "v100x2-16g-pcie"))


def test_forcing_takes_cards_of_other_kinds_after_v100s(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--preset", "v100x2-16g-pcie", "--volta", "force")
    assert visible(configured(model, monkeypatch, [H200, V16], *flags)) == "GPU-1-uuid,GPU-0-uuid"
    assert visible(configured(model, monkeypatch, [H200, H200], *flags)) == "GPU-0-uuid,GPU-1-uuid"


@pytest.mark.parametrize("cards", [[P40], [P40, H200]])
def test_a_preset_for_v100s_on_other_cards_is_refused_unless_forced(
    model: Path, monkeypatch: pytest.MonkeyPatch, cards: list[tuple[str, str, int, bool]]
) -> None:
    monkeypatch.setattr("server.config.settings.engine_is_cpu_build", lambda: False)
    asked = ("--preset", "v100x1-16g")
    with pytest.raises(PreflightError, match=r"expected GPUs of compute capability 7\.0, got Tesla P40 \(6\.1"):
        preflight.check(configured(model, monkeypatch, cards, *asked))
    preflight.check_gpus(configured(model, monkeypatch, cards, *asked, "--volta", "force"))


def test_a_preset_for_gpus_is_refused_where_the_engine_is_for_cpus(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, monkeypatch, [V16], "--preset", "v100x1-16g")
    monkeypatch.setattr("server.config.settings.engine_is_cpu_build", lambda: True)
    with pytest.raises(PreflightError, match=r"the installed engine is the CPU build.*make setup ENGINE=gpu"):
        preflight.check(config)


def test_cards_without_a_v100_among_them_have_no_preset(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no preset covers the GPUs found"):
        configured(model, monkeypatch, [P40, H200])


@pytest.mark.parametrize(
    ("entries", "used"),
    [("2", "GPU-2-uuid"), ("GPU-2", "GPU-2-uuid"), (" 2 , 1", "GPU-2-uuid,GPU-1-uuid"), ("GPU-1-uuid", "GPU-1-uuid")],
)
def test_the_user_s_choice_is_kept(model: Path, monkeypatch: pytest.MonkeyPatch, entries: str, used: str) -> None:
    config = configured(model, monkeypatch, [V16] * 3, CUDA_VISIBLE_DEVICES=entries)
    assert visible(config, {"CUDA_VISIBLE_DEVICES": entries}) == used


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("0,7,1", "got '7', which names none"),
        ("gpu0", "got 'gpu0', which names none"),
        ("0,,1", "got '', which names none"),
        ("GPU-", "got 'GPU-', which 3 GPUs' UUIDs begin with"),
        ("1,GPU-1", "got 'GPU-1' twice"),
        ("MIG-5b-uuid", "a slice of a GPU"),
        ("-2", "got '-2', which names none"),
    ],
)
def test_a_choice_that_names_no_card_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, entries: str, says: str
) -> None:
    with pytest.raises(
        PreflightError, match=f"CUDA_VISIBLE_DEVICES={entries}: expected GPUs by index or UUID"
    ) as error:
        configured(model, monkeypatch, [V16] * 3, CUDA_VISIBLE_DEVICES=entries)
    assert says in str(error.value)
    assert "0 or GPU-0-uuid (Tesla V100-PCIE-16GB)" in str(error.value)


@pytest.mark.parametrize("entries", ["", "-1", "NoDevFiles", " "])
def test_a_choice_that_hides_every_card_is_said_so(model: Path, monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    with pytest.raises(PreflightError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        configured(model, monkeypatch, [V16] * 2, CUDA_VISIBLE_DEVICES=entries)


def test_a_card_that_is_lost_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, [V16, V16])

    def lost(handle: int) -> SimpleNamespace:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    with pytest.raises(PreflightError, match="does not answer for one of its GPUs"):
        find_devices({})
