"""From the command line's flags to the plan."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lookalikes.public_models import dense, hybrid
from server.config.devices import Device, Devices
from server.config.presets import load_presets
from server.config.settings import Config, load_config
from server.errors import UserError
from server.plan import plan_for
from server.plan.memory import make_plan
from server.plan.settings import available_memory, device_of, run_of, split_of
from server.units import GIB

from .models import model
from .test_model import write

PRESETS = load_presets()
GPU_PRESETS = sorted(name for name, preset in PRESETS.items() if preset.match is not None)


def config(model_directory: Path, *flags: str, gpus: tuple[Device, ...] = ()) -> Config:
    return load_config(["--model", str(model_directory), *flags], {}, lambda: Devices(gpus, "no driver"))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    shape, entries = dense("32B")
    return write(tmp_path, shape, {"model.safetensors": entries}, index=False)


def test_a_preset_is_planned_for_on_a_machine_without_its_gpus(qwen: Path) -> None:
    planned = plan_for(config(qwen, "--preset", "v100x2-16g-pcie"))
    assert planned.plan.fits
    assert planned.plan.split.tensor == 2
    assert planned.plan.device.memory_bytes == 16160 * 2**20
    assert planned.decision is not None
    assert planned.decision.choice == "TP=2"


def test_the_smallest_card_counts(qwen: Path) -> None:
    cards = (Device("V100", "GPU-0", "7.0", 32, nvlink=False), Device("V100", "GPU-1", "7.0", 16, nvlink=False))
    planned = plan_for(config(qwen, "--preset", "v100x2-32g-pcie", "--max-model-len", "40960", gpus=cards))
    assert planned.plan.device.memory_bytes < 16 * GIB
    assert "--max-model-len 40960" in planned.plan.problems[0]


def test_a_split_that_the_model_s_heads_forbid_does_not_fit(tmp_path: Path) -> None:
    shape, entries = dense("8B", num_attention_heads=9, head_dim=128)
    write(tmp_path, shape, {"model.safetensors": entries}, index=False)
    asked = ("--preset", "v100x2-16g-pcie", "--tensor-parallel-size", "2")
    problems = plan_for(config(tmp_path, *asked)).plan.problems
    assert "num_attention_heads=9 is not divisible" in problems[0]


def test_the_engine_s_defaults_stand_for_what_no_flag_says(qwen: Path) -> None:
    shape = model("32B")
    for name, batched in (("v100x2-16g-pcie", 2048), ("cpu-smoke", 2048)):
        configuration = config(qwen, "--preset", name)
        device = device_of(configuration, PRESETS[name])
        run = run_of(configuration, shape, device, split_of(configuration.engine))
        assert run.batched == batched
    configuration = config(qwen, "--preset", "v100x2-16g-pcie", "--kv-cache-dtype", "fp8", "--max-model-len", "4K")
    run = run_of(configuration, shape, device, split_of(configuration.engine))
    assert (run.length, run.dtype_bytes) == (4096, 2)


def test_without_gpus_the_cache_is_what_the_preset_gives(qwen: Path) -> None:
    planned = plan_for(config(qwen, "--preset", "cpu-smoke"))
    assert planned.plan.cache_bytes == GIB
    assert not planned.options
    assert planned.decision is None


def test_on_a_cpu_only_a_quantized_model_keeps_its_embedding_in_16_bits(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.plan.settings.weight_form", lambda **_: "packed")
    configuration = config(qwen, "--preset", "cpu-smoke")
    device = device_of(configuration, PRESETS["cpu-smoke"])
    quantized = model("8B")
    for shape, expected in ((quantized, 2), (replace(quantized, linears=()), 4)):
        assert run_of(configuration, shape, device, split_of({})).embedding_bytes == expected


def test_the_available_memory_is_read_from_meminfo() -> None:
    assert available_memory("MemTotal: 9 kB\nMemAvailable:    1024 kB\n") == 2**20
    with pytest.raises(ValueError, match="MemAvailable"):
        available_memory("MemTotal: 9 kB\n")


def test_every_number_of_the_report_comes_with_its_formula(qwen: Path) -> None:
    report = plan_for(config(qwen, "--preset", "v100x2-16g-pcie")).as_dict()
    assert all(item["formula"] for item in (*report["items"], *report["outside"], report["load_peak"]))
    assert report["budget"]["formula"] == "16944988160 B · 0.9"
    cache = report["cache"]
    assert cache["tokens"] == cache["bytes"] // cache["block_bytes"] * cache["block_size"]
    assert [option["split"] for option in report["options"]] == ["TP=1", "TP=2", "TP=4", "TP=1 PP=2", "TP=1 PP=4"]


def test_what_the_plan_leaves_out_is_noted(tmp_path: Path, qwen: Path) -> None:
    shape, entries = hybrid()
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    planned = plan_for(config(write(seeing, shape, {"a.safetensors": entries}, index=False), "--preset", "v100x1-32g"))
    assert "vision encoder" in planned.as_dict()["notes"][0]
    assert "note: not in this sum" in planned.as_text()
    assert plan_for(config(qwen, "--preset", "v100x1-32g")).as_dict()["notes"] == []


def test_the_report_for_people_ends_with_the_verdict(qwen: Path) -> None:
    assert plan_for(config(qwen, "--preset", "v100x2-16g-pcie")).as_text().splitlines()[-1] == "fits."
    refused = plan_for(config(qwen, "--preset", "v100x1-16g")).as_text()
    assert refused.splitlines()[-1].startswith("does not fit: 20.01 GiB are needed of 14.20 GiB")
    assert "split: TP=2" in plan_for(config(qwen, "--preset", "v100x2-16g-pcie")).as_text()


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_s_limits_are_what_the_plan_computes(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    configuration = config(tmp_path, "--preset", name)
    source = preset.limits["max-model-len"].source
    quoted = re.search(r"Qwen[\d.]+-(\w+) in NVFP4: ([\d,]+) tokens of cache, (\d+) sequences", source)
    assert quoted, source
    shape = model(quoted[1])
    device, split = device_of(configuration, preset), split_of(configuration.engine)
    plan = make_plan(shape, device, run_of(configuration, shape, device, split), split)
    assert plan.fits
    assert (f"{plan.tokens:,}", str(plan.together)) == (quoted[2], quoted[3])
    sequences = preset.limits["max-num-seqs"]
    assert f"{sequences.value} sequences of {plan.longest:,} tokens at once" in sequences.source
    assert preset.match is not None
    assert (split.tensor if configuration.over_ray else split.gpus) == preset.match.count


def test_a_16_bit_model_is_planned_as_what_quantize_makes_of_it(tmp_path: Path) -> None:
    """Every number is that of the quantized model itself."""
    from quant.quantize import quantize_checkpoint
    from tests.quant.tiny_model import tiny_model

    source = tiny_model(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out")
    flags = ("--preset", "v100x1-16g", "--max-model-len", "128")
    made, foreseen, dense16 = (
        plan_for(config(tmp_path / "out", *flags)),
        plan_for(config(source, *flags), quantized=True),
        plan_for(config(source, *flags)),
    )
    assert len(foreseen.model.linears) == 14
    assert {**foreseen.as_dict(), "as": ""} == {**made.as_dict(), "as": ""}
    assert foreseen.as_dict()["as"] == "nvfp4"
    assert foreseen.as_text().startswith("once it is made NVFP4 by `voltserve quantize`:\n")
    assert sum(item.bytes for item in foreseen.plan.items[:2]) < sum(item.bytes for item in dense16.plan.items[:2])
    with pytest.raises(UserError, match=r"expected a 16-bit model, got one with 14 linears in 4 bits"):
        plan_for(config(tmp_path / "out", *flags), quantized=True)
