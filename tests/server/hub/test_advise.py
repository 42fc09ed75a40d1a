"""advise: which known models suit some V100s. The catalogue's shapes are the public models', its facts have sources."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from lookalikes.public_models import dense, hybrid, mixture
from server.config.devices import Device, Devices
from server.errors import ConfigError
from server.hub.advise import REFUSED, REPORTED, SERVED, TOO_LARGE, Advised, advise, preset_for
from server.hub.catalogue import UNKNOWN, load_catalogue
from server.hub.source import parse_source
from server.plan.model import describe, text_only
from tests.server.conftest import ROOT

from .conftest import run

CATALOGUE = load_catalogue()
NOT_COMPUTED = ", which the kernel for experts does not compute"


@lru_cache
def on(spec: str) -> Advised:
    return advise(CATALOGUE, preset_for(spec))


def card(memory_gib: int = 16, *, nvlink: bool = False, capability: str = "7.0") -> Device:
    return Device("Tesla V100", "GPU-0", capability, memory_gib, nvlink=nvlink)


@pytest.mark.parametrize(
    ("name", "public"), [("qwen3-32b", dense("32B")), ("qwen3-30b-a3b", mixture()), ("qwen3.8-27b", hybrid())]
)
def test_a_shape_is_the_public_models(name: str, public: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, theirs = CATALOGUE.shapes[name].model(), text_only(describe(*public, "config.json"))
    assert {(one.name, one.rows, one.columns) for one in ours.linears} == {
        (one.name, one.rows, one.columns) for one in theirs.linears
    }
    assert ours.kinds == theirs.kinds
    assert (ours.hidden, ours.vocabulary, ours.experts) == (theirs.hidden, theirs.vocabulary, theirs.experts)


def test_the_catalogue_names_only_what_it_has_and_says_where_it_was_read() -> None:
    names = [one.name for one in CATALOGUE.checkpoints]
    assert len(set(names)) == len(names) >= 25
    for one in CATALOGUE.checkpoints:
        source = parse_source(one.name, environ={})
        assert source.kind == "hf"
        assert one.quantization in {"", *CATALOGUE.quantizations}
        assert one.shape in {"", *CATALOGUE.shapes}
        assert one.source
        assert one.exact_name or "exact name" in one.notes


def test_the_missions_model_is_first_on_two_cards_with_the_figures_of_plan() -> None:
    first = on("2x16g-pcie").advice[0]
    assert first.checkpoint.name == "hf:QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4"
    computed = json.loads(sorted((ROOT / "docs/results").glob("v100-27b-computed-*.json"))[-1].read_text())
    alone = next(row for row in computed["memory"] if row["max_num_seqs"] == 1)
    assert first.context == alone["longest_for_max_num_seqs"]
    assert first.speed is not None
    assert 0 < first.speed.low < first.speed.high
    assert first.command == f"voltserve model fetch {first.checkpoint.name} models/Qwen3.8-27B-QUASAR-NVFP4"


def test_more_memory_is_more_context_and_nothing_fits_one_small_card() -> None:
    contexts = [on(spec).advice[0].context for spec in ("2x16g-pcie", "1x32g", "2x32g-sxm2")]
    assert contexts == sorted(contexts)
    assert [one for one in on("1x16g").advice if one.status == SERVED] == []
    assert all(
        "are needed of" in one.reason or "reported" in one.reason
        for one in on("1x16g").advice
        if one.status == TOO_LARGE
    )


# Of the checkpoints that people download, those that are not served: all others are.
NOT_SERVED = {
    "nvidia/Nemotron-3.5-Lightning-30B-A3B": f"its experts have an ungated squared-ReLU activation{NOT_COMPUTED}",
    "nvidia/Nemotron-3-Nano-30B-A3B-NVFP4": f"its experts have an ungated squared-ReLU activation{NOT_COMPUTED}",
    "nvidia/Gemma-4-26B-A4B-NVFP4": f"its experts have a GELU activation{NOT_COMPUTED}",
    "openai/gpt-oss-20b": "MXFP4",
    "openai/gpt-oss-120b": "MXFP4",
    "Qwen/Qwen3-30B-A3B-FP8": "its experts are FP8, which the kernel for experts does not read",
    "RedHatAI/Qwen3-32B-quantized.w4a16": "4-bit integers (compressed-tensors' pack-quantized)",
}


def test_what_is_refused_says_why_and_offers_no_command() -> None:
    refused = {one.checkpoint.name: one for one in on("2x16g-pcie").advice if one.status == REFUSED}
    assert {name.removeprefix("hf:"): one.reason for name, one in refused.items()} == NOT_SERVED
    text = on("2x16g-pcie").as_text()
    assert "model fetch hf:openai/gpt-oss-20b" not in text
    assert text.index("1. hf:QUASAR") < text.index("2. hf:nvidia/Qwen3-32B") < text.index("refused today:")


def test_whether_a_format_is_served_is_asked_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.hub import catalogue

    monkeypatch.setattr(catalogue, "_is_computed", lambda _quantization: True)
    advised = advise(CATALOGUE, preset_for("2x16g-pcie"))
    refused = {one.checkpoint.name for one in advised.advice if one.status == REFUSED}
    assert "hf:openai/gpt-oss-20b" not in refused
    assert "hf:nvidia/Gemma-4-26B-A4B-NVFP4" in refused  # its experts' activation


def test_a_name_that_is_not_exact_is_not_fetched() -> None:
    vague = [one for one in on("2x16g-pcie").advice if not one.checkpoint.exact_name]
    assert vague
    assert {one.command for one in vague} == {""}
    assert REPORTED in {one.status for one in vague}


def test_a_known_revision_is_part_of_the_command() -> None:
    first = on("2x16g-pcie").advice[0]
    assert first.checkpoint.revision == UNKNOWN
    pinned = replace(first, checkpoint=first.checkpoint.model_copy(update={"revision": "abc"}))
    assert "QUASAR-NVFP4@abc models/" in pinned.command


def test_the_cards_found_are_advised_about() -> None:
    assert preset_for("", Devices((card(), card()), "")).name == "v100x2-16g-pcie"
    assert preset_for("", Devices((card(32, nvlink=True),) * 4, "")).name == "v100x4-32g-sxm2"
    for gpus in ((), (card(80, capability="9.0"),)):
        with pytest.raises(ConfigError, match="no V100 is found here; say which cards are meant: --gpus"):
            preset_for("", Devices(gpus, "no driver"))


@pytest.mark.parametrize("spec", ["2x16", "2x16g", "0x16g", "2x24g-pcie", "many"])
def test_cards_that_are_unknown_are_refused_with_what_is_known(spec: str) -> None:
    code, out = run("advise", "--gpus", spec)
    assert code == 2
    assert "2x16g-pcie" in out


def test_json_has_every_model_with_its_status() -> None:
    code, out = run("advise", "--gpus", "2x16g-pcie", "--json")
    assert code == 0
    models = json.loads(out)["models"]
    assert len(models) == len(CATALOGUE.checkpoints)
    assert models[0]["speed"]["provenance"] == "computed"
    assert {one["status"] for one in models} == {SERVED, REPORTED, TOO_LARGE, REFUSED}


def test_hubs_and_advice_need_no_torch() -> None:
    script = (
        "import sys\nfrom server.cli import app\nfrom server.hub import advise, fetch, huggingface, outline\n"
        "from typer.testing import CliRunner\nhuggingface.saved_token()\n"
        "assert CliRunner().invoke(app, ['advise', '--gpus', '2x16g-pcie']).exit_code == 0\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_catalogue_is_installed_with_the_program() -> None:
    from server.hub.catalogue import FILE

    assert FILE.parent == Path(ROOT / "configs")
