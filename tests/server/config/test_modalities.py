import json
from dataclasses import replace
from pathlib import Path

import pytest

from lookalikes.quasar import write
from lookalikes.quasar_config import SMALL
from server.config.devices import Device, Devices
from server.config.flags import FlagValue
from server.config.modalities import choose_text_only, is_text_only
from server.config.settings import load_config
from server.plan import plan_for

ON_SMALL_CARDS = ("--preset", "v100x2-16g-sxm2")


def cards(memory_gib: int, count: int = 2) -> Devices:
    return Devices(tuple(Device("Tesla V100", f"GPU-{n}", "7.0", memory_gib, nvlink=True) for n in range(count)))


@pytest.fixture(scope="module")
def lookalike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quasar")
    write(folder / "whole")
    write(folder / "half", replace(SMALL, layers=4))
    return folder / "half"


@pytest.mark.parametrize(("memory_gib", "left_out"), [(16, True), (32, False)])
def test_small_cards_do_not_load_an_image_encoder(lookalike: Path, memory_gib: int, left_out: bool) -> None:
    preset = f"v100x2-{memory_gib}g-sxm2"
    config = load_config(["--model", str(lookalike), "--preset", preset], {}, lambda: cards(memory_gib))
    assert config.engine.get("language-model-only", False) is left_out
    assert any(made.what == "images and video" for made in config.decisions) is left_out


@pytest.mark.parametrize("flag", ["--no-language-model-only", "--limit-mm-per-prompt={}"])
def test_a_flag_of_the_user_s_is_left_alone(lookalike: Path, flag: str) -> None:
    config = load_config([*ON_SMALL_CARDS, "--model", str(lookalike), flag], {}, lambda: cards(16))
    assert config.engine.get("language-model-only", False) is False


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"architectures": ["LlamaForCausalLM"]}), None])
def test_a_model_without_an_image_encoder_needs_no_choice(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert choose_text_only(tmp_path, {}, 16) is None


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, False),
        ({"language-model-only": True}, True),
        ({"language-model-only": False}, False),
        ({"limit-mm-per-prompt": {"image": 0, "video": 0}}, True),
        ({"limit-mm-per-prompt": {"image": 0}}, False),
        ({"limit-mm-per-prompt": {"image": 2, "video": 0}}, False),
    ],
)
def test_the_engine_leaves_the_encoder_out_where_nothing_is_allowed(
    engine: dict[str, FlagValue], expected: bool
) -> None:
    assert is_text_only(engine) is expected


def test_the_plan_of_a_hybrid_is_what_the_engine_reports(lookalike: Path) -> None:
    """vLLM on a CPU, all 8 layers: 5,706,912 bytes of weights (0.19.1), 250,406 tokens of cache (0.28.0).

    Embedding and head are in float32 there, since this model's classes ask for nothing else; the plan has 2 bytes.
    """
    planned = plan_for(
        load_config(["--model", str(lookalike.parent / "whole"), "--preset", "cpu-smoke"], {}, lambda: Devices(()))
    )
    weights = sum(item.bytes for item in planned.plan.items if item.name.endswith("weights"))
    assert weights + 2 * 2 * SMALL.vocabulary * SMALL.hidden == pytest.approx(5_706_912, abs=64)
    assert planned.plan.tokens == 250_406


def test_the_plan_says_what_leaving_it_out_spares(lookalike: Path) -> None:
    flags = [*ON_SMALL_CARDS, "--model", str(lookalike), "--max-model-len", "1024"]
    without = plan_for(load_config(flags, {}, lambda: cards(16)))
    with_it = plan_for(load_config([*flags, "--no-language-model-only"], {}, lambda: cards(16)))
    encoder = sum(tensor.nbytes for tensor in with_it.model.plain if "visual" in tensor.name)
    assert without.model.left_out_bytes == encoder > 0
    assert with_it.model.left_out_bytes == 0
    weights = [
        next(item.bytes for item in made.plan.items if item.name == "other weights") for made in (without, with_it)
    ]
    assert encoder / 2 <= weights[1] - weights[0] <= encoder  # on one of two cards, which share its linears
    assert "spares" in without.as_text()
    assert "--language-model-only spares" in with_it.as_text()
