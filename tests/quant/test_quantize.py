import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.blockwise import quantize_matrix
from quant.calibrate import CalibrationSettings
from quant.calibration_text import Text
from quant.constants import INDEX_NAME
from quant.errors import QuantError
from quant.formats import quantize_config
from quant.formats.compressed_tensors import GLOBAL, PACKED, SCALE, read_config, read_linear, scheme
from quant.formats.detect import detect
from quant.formats.quantize_config import QuantizeConfig
from quant.inspect import inspect_model
from quant.methods import Method
from quant.progress import OnProgress, Progress
from quant.quantize import quantize_checkpoint
from quant.safetensors_file import open_checkpoint
from quant.selection import DEFAULT_IGNORE
from quant.tensor import NVFP4Tensor
from quant.verify.servable import Target, examine
from tests.quant.files import names_in

ATTENTION = "model.layers.0.self_attn"


def random(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).half()


def tensors() -> dict[str, torch.Tensor]:
    """A model whose q/k/v differ in size tenfold, so that their own globals would differ too."""
    return {
        "model.embed_tokens.weight": random(32, 64, 0),
        f"{ATTENTION}.q_proj.weight": random(64, 64, 1),
        f"{ATTENTION}.k_proj.weight": random(32, 64, 2, 0.1),
        f"{ATTENTION}.v_proj.weight": random(32, 64, 3, 10.0),
        f"{ATTENTION}.o_proj.weight": random(64, 64, 4),
        "model.layers.0.mlp.odd_proj.weight": random(8, 40, 5),
        "model.layers.0.input_layernorm.weight": torch.ones(64).half(),
    }


def model_directory(path, changed=(), *, sharded=False):
    """A source directory; sharded puts every tensor into a shard of its own, q, k and v too."""
    path.mkdir()
    contents = {**tensors(), **dict(changed)}
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": "float32", "x": [1]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (path / name).write_text(f"contents of {name}")
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", ".hidden.json"):
        (path / name).write_text("not to be copied")
    if not sharded:
        save_file(contents, path / "model.safetensors")
        return path
    weight_map = {}
    for number, (name, tensor) in enumerate(contents.items()):
        weight_map[name] = f"model-{number:05}.safetensors"
        save_file({name: tensor}, path / weight_map[name])
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return path


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for shard in open_checkpoint(directory).shards for name, t in load_file(directory / shard).items()}


def read(directory: Path, module: str, group_size: int = 16) -> NVFP4Tensor:
    everything = loaded(directory)
    return read_linear(
        {suffix: everything[f"{module}.{suffix}"] for suffix in (PACKED, SCALE, GLOBAL)}, module, group_size
    )


@pytest.fixture
def source(tmp_path):
    return model_directory(tmp_path / "source")


@pytest.mark.parametrize("policy", ["maxabs", "mse", "fourosix"])
@pytest.mark.parametrize("group_size", [16, 32])
def test_linears_are_quantized_and_the_rest_is_kept(tmp_path, source, policy, group_size):
    report = quantize_checkpoint(source, tmp_path / "out", method=Method(policy), group_size=group_size)

    expected = quantize_matrix(tensors()[f"{ATTENTION}.o_proj.weight"], policy=policy, group_size=group_size)
    got = read(tmp_path / "out", f"{ATTENTION}.o_proj", group_size)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.dequantize(), expected.dequantize())
    assert sorted(report.quantized) == [f"{ATTENTION}.{name}_proj" for name in "koqv"]
    assert dict(report.kept) == {
        "model.embed_tokens.weight": "ignored by 're:.*embed'",
        "model.layers.0.input_layernorm.weight": "not a 2-D float weight",
        "model.layers.0.mlp.odd_proj.weight": f"K=40 is not a multiple of {group_size}",
    }
    for name in report.kept:
        assert torch.equal(loaded(tmp_path / "out")[name], tensors()[name])


def test_the_report_s_sizes_are_those_of_the_tensors(tmp_path, source):
    report = quantize_checkpoint(source, tmp_path / "out")

    assert report.source_bytes == sum(t.nbytes for t in tensors().values())
    assert report.output_bytes == sum(t.nbytes for t in loaded(tmp_path / "out").values())
    assert report.output_bytes < report.source_bytes


@pytest.mark.parametrize("sharded", [False, True])
def test_fused_layers_share_the_global_of_the_largest_even_across_shards(tmp_path, sharded):
    source = model_directory(tmp_path / "source", sharded=sharded)

    quantize_checkpoint(source, tmp_path / "out")

    out = loaded(tmp_path / "out")
    largest = float(tensors()[f"{ATTENTION}.v_proj.weight"].abs().max())
    for member in ("q_proj", "k_proj", "v_proj"):
        assert out[f"{ATTENTION}.{member}.{GLOBAL}"].tolist() == [float(torch.tensor(2688 / largest))]
        weight = tensors()[f"{ATTENTION}.{member}.weight"].float()
        error = (read(tmp_path / "out", f"{ATTENTION}.{member}").dequantize() - weight).norm() / weight.norm()
        assert float(error) < 0.1, member
    assert out[f"{ATTENTION}.o_proj.{GLOBAL}"] != out[f"{ATTENTION}.q_proj.{GLOBAL}"]


def test_sharding_does_not_change_the_result_and_the_index_names_it(tmp_path, source):
    sharded = model_directory(tmp_path / "sharded", sharded=True)

    quantize_checkpoint(source, tmp_path / "one")
    quantize_checkpoint(sharded, tmp_path / "many")

    one, many = loaded(tmp_path / "one"), loaded(tmp_path / "many")
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), many[name].reshape(-1).view(torch.uint8)), name
    assert not (tmp_path / "one" / INDEX_NAME).exists()
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    assert index["weight_map"].keys() == many.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("model.embed_tokens", "looks its rows up"),
        ("lm_head", "keeps a head in 16 bits"),
        ("model.layers.0.mlp.gate", "decides which experts compute"),
        ("model.layers.0.mlp.shared_expert_gate", "decides which experts compute"),
    ],
)
def test_what_no_engine_serves_in_4_bits_is_refused_before_the_work(tmp_path, module, says, monkeypatch):
    source = model_directory(tmp_path / "source")
    save_file({**tensors(), f"{module}.weight": random(64, 64, 3)}, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "by-default")
    assert f"{module}.weight" in loaded(tmp_path / "by-default")

    monkeypatch.setattr("quant.quantize._largest_magnitudes", None)  # nothing is read
    ignore = ("re:.*o_proj",) if "embed" in module else ("re:.*o_proj", "re:.*embed")
    with pytest.raises(QuantError, match=rf"{module}: expected 16-bit weights .*{says}.*--ignore-only"):
        quantize_checkpoint(source, tmp_path / "out", ignore=ignore)
    assert names_in(tmp_path) == ["by-default", "source"]


def test_an_architecture_that_the_engine_does_not_know_is_refused_before_the_work(tmp_path, source):
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["Qwen3_6ForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantError, match=r"architectures: expected .* the nearest known are Qwen3_5ForCausalLM "):
        quantize_checkpoint(source, tmp_path / "out")
    assert names_in(tmp_path) == ["source"]


def test_the_configs_describe_the_result(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "out", method=Method("maxabs"), group_size=32, ignore=("re:.*embed",))

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = read_config(config.pop("quantization_config"), "config.json")
    assert described == scheme(32, ("re:.*embed", "model.layers.0.mlp.odd_proj"))
    assert config == {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "x": [1]}
    assert quantize_config.read(tmp_path / "out") == QuantizeConfig(
        32, "maxabs", source="source", voltserve_version=importlib.metadata.version("voltserve")
    )


def test_tokenizer_template_and_licence_are_copied_but_no_other_weights(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "out")

    assert names_in(tmp_path / "out") == [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "contents of tokenizer.json"


def test_kept_bfloat16_and_integers_stay_and_float32_becomes_float16(tmp_path):
    changed = {
        "a.norm.weight": torch.tensor([1e30]).to(torch.bfloat16),
        "b.norm.weight": torch.tensor([0.1, torch.inf]),
        "c.table": torch.tensor([1, 2]),
        f"{ATTENTION}.o_proj.weight": tensors()[f"{ATTENTION}.o_proj.weight"].float(),
    }

    quantize_checkpoint(model_directory(tmp_path / "source", changed), tmp_path / "out")

    out = loaded(tmp_path / "out")
    assert torch.equal(out["a.norm.weight"], changed["a.norm.weight"])
    assert torch.equal(out["b.norm.weight"], changed["b.norm.weight"].half())
    assert torch.equal(out["c.table"], changed["c.table"])
    assert f"{ATTENTION}.o_proj.{PACKED}" in out


def test_progress_is_absolute_and_reaches_its_total(tmp_path, source):
    reports: list[Progress] = []

    quantize_checkpoint(source, tmp_path / "out", on_progress=reports.append)

    size = sum(t.nbytes for t in tensors().values())
    linears = sum(t.nbytes for name, t in tensors().items() if ATTENTION in name)
    for what, total in (("scanning weights", linears), ("quantizing", linears), ("writing", size)):
        done = [report.done for report in reports if report.what == what]
        assert done == sorted(done)
        assert {(report.total, report.unit) for report in reports if report.what == what} == {(total, "bytes")}
        assert done[-1] == total


def _nan() -> torch.Tensor:
    weight = tensors()[f"{ATTENTION}.o_proj.weight"]
    weight[3, 7] = torch.nan
    return weight


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{ATTENTION}.o_proj.weight": _nan()}, r"model\.safetensors: .*o_proj\.weight\[3, 7\]: expected a finite"),
        ({"norm.weight": torch.tensor([1e6])}, r"norm\.weight: expected values within float16's 65504, got 1000000\.0"),
        (
            {"x.weight": torch.zeros(1).to(torch.float8_e4m3fn)},
            r"x\.weight: expected .*, got quantized torch\.float8_e4m3fn",
        ),
        ({"x.weight_packed": torch.zeros(1, dtype=torch.uint8)}, r"x\.weight_packed: expected .*, got quantized"),
    ],
)
def test_a_bad_tensor_is_named_and_nothing_is_left(tmp_path, changed, message):
    source = model_directory(tmp_path / "source", changed)

    with pytest.raises(QuantError, match=message):
        quantize_checkpoint(source, tmp_path / "out")

    assert names_in(tmp_path) == ["source"]


def _quantized_already(source: Path) -> None:
    (source / "config.json").write_text('{"quantization_config": {}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda source: (source / "config.json").unlink(), r"config\.json is missing"),
        (lambda source: (source / "config.json").write_text("{"), r"config\.json: expected a JSON object"),
        (lambda source: (source / "model.safetensors").unlink(), r"expected .*one \*\.safetensors file, got 0"),
        (_quantized_already, r"is quantized already \(config\.json has a quantization_config\)"),
        (
            lambda source: (source / "quantize_config.json").touch(),
            r"is quantized already \(quantize_config\.json exists\)",
        ),
        (
            lambda source: (source / "hf_quant_config.json").touch(),
            r"is quantized already \(hf_quant_config\.json exists\)",
        ),
        (lambda source: source.rename(source.parent / "elsewhere"), r"source is not a directory"),
    ],
)
def test_a_source_that_is_no_16_bit_model_is_refused(tmp_path, source, damage, message):
    damage(source)

    with pytest.raises(QuantError, match=message):
        quantize_checkpoint(source, tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("full_config", [False, True])
def test_a_lora_adapter_is_told_to_be_merged_first(tmp_path, full_config):
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-32B", "r": 16}))
    save_file({"base_model.model.q_proj.lora_A.weight": random(8, 64, 0)}, adapter / "adapter_model.safetensors")
    if full_config:
        (adapter / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))

    told = r"lora is a LoRA adapter.*Merge it.*Qwen/Qwen3-32B.*merge_and_unload"
    for use in (inspect_model, detect, lambda folder: quantize_checkpoint(folder, tmp_path / "out")):
        with pytest.raises(QuantError, match=told):
            use(adapter)
    assert re.search(told, str(examine(adapter, Target("cpu")).refusal))
    assert names_in(tmp_path) == ["lora"]


def test_a_merged_model_with_its_adapter_s_config_beside_it_is_a_model(tmp_path, source):
    (source / "adapter_config.json").write_text("{}")
    quantize_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


best: Any = "best"  # a name that the types exclude, too


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": Method(best)}, "scale policy: expected one of maxabs, mse, fourosix, quasar, got 'best'"),
        (
            {"calibration": CalibrationSettings(Text("a", "a.txt"))},
            "expected none for mse, which runs no model, got a.txt",
        ),
        ({"group_size": 64}, "block size: expected 16 or 32, got 64"),
        ({"ignore": ("re:.*",)}, "expected linear layers to quantize, got none"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, source, options, message):
    with pytest.raises(QuantError, match=message):
        quantize_checkpoint(source, tmp_path / "out", **options)


def test_an_existing_destination_is_refused_before_any_work(tmp_path, source):
    with pytest.raises(QuantError, match="source exists and is not empty"):
        quantize_checkpoint(source, source, on_progress=lambda progress: pytest.fail(str(progress)))


class Stopped(Exception):
    """What ends a run from outside."""


def stop_at(what: str, done: int = 0) -> OnProgress:
    def on_progress(progress: Progress) -> None:
        if progress.what == what and progress.done > done:
            raise Stopped

    return on_progress


def test_stopped_while_scanning_it_leaves_nothing(tmp_path, source):
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop_at("scanning weights"))

    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("what", ["quantizing", "writing"])
def test_a_stopped_run_goes_on_where_it_was(tmp_path, source, what, monkeypatch):
    quantize_checkpoint(source, tmp_path / "whole")
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop_at(what))
    assert names_in(tmp_path) == [".out.resume", "source", "whole"]
    left = {f"{ATTENTION}.{name}_proj" for name in "koqv"} - {
        path.stem for path in (tmp_path / ".out.resume").glob("*.safetensors")
    }
    quantized = []

    def spy(weight, **options):
        quantized.append(options["name"].split()[-1].removesuffix(".weight"))
        return quantize_matrix(weight, **options)

    monkeypatch.setattr("quant.quantize.quantize_matrix", spy)
    quantize_checkpoint(source, tmp_path / "out")

    assert set(quantized) == left
    assert len(left) < 4
    assert names_in(tmp_path) == ["out", "source", "whole"]
    for name, tensor in loaded(tmp_path / "whole").items():
        assert torch.equal(loaded(tmp_path / "out")[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    "changed", [{"method": Method("maxabs")}, {"group_size": 32}, {"ignore": (*DEFAULT_IGNORE, "re:.*o_proj")}]
)
def test_a_run_with_other_options_does_not_use_what_was_left(tmp_path, source, changed):
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop_at("writing"))

    quantize_checkpoint(source, tmp_path / "out", **changed)
    quantize_checkpoint(source, tmp_path / "fresh", **changed)

    out, fresh = loaded(tmp_path / "out"), loaded(tmp_path / "fresh")
    assert out.keys() == fresh.keys()
    for name, tensor in fresh.items():
        assert torch.equal(out[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_changed_source_does_not_use_what_was_left(tmp_path, source):
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop_at("writing"))
    changed = {**tensors(), f"{ATTENTION}.o_proj.weight": random(64, 64, 9)}
    save_file(changed, source / "model.safetensors")

    quantize_checkpoint(source, tmp_path / "out")

    expected = quantize_matrix(changed[f"{ATTENTION}.o_proj.weight"])
    assert torch.equal(read(tmp_path / "out", f"{ATTENTION}.o_proj").codes, expected.codes)


def test_a_damaged_leftover_is_named_and_removed(tmp_path, source):
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop_at("writing"))
    (tmp_path / ".out.resume" / f"{ATTENTION}.o_proj.safetensors").write_text("x")

    with pytest.raises(QuantError, match=r"o_proj\.safetensors: expected kept results"):
        quantize_checkpoint(source, tmp_path / "out")

    assert names_in(tmp_path) == ["source"]
