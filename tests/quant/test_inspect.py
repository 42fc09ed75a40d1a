import pytest

from quant.errors import QuantError
from quant.inspect import inspect_model
from tests.quant.checkpoints import FFN, HIDDEN, LAYERS, LINEARS, VOCAB, write_model
from tests.quant.lookalikes import fp8
from tests.quant.lookalikes import write as write_lookalike


def test_sizes_shapes_and_format_are_told(tmp_path):
    summary = inspect_model(write_model(tmp_path / "model"))

    weights = LAYERS * sum(rows * columns for rows, columns in LINEARS.values())
    assert (summary.architecture, summary.format, summary.group_size) == ("LlamaForCausalLM", "compressed-tensors", 16)
    assert (summary.layers, summary.linears, summary.shards, summary.problems) == (2, 14, 2, 0)
    assert summary.parameters == weights + 2 * VOCAB * HIDDEN + LAYERS * HIDDEN
    assert summary.bytes_by_kind == {
        "NVFP4 linears": weights // 2 + weights // 16 + 14 * 4,
        "embedding": VOCAB * HIDDEN * 2,
        "head": VOCAB * HIDDEN * 2,
        "norms and biases": LAYERS * HIDDEN * 2,
    }
    assert summary.bytes == sum(summary.bytes_by_kind.values())
    assert summary.shapes[f"gate_proj [{FFN}, {HIDDEN}]"] == LAYERS
    assert summary.kept_modules == ("embed_tokens", "lm_head")
    assert summary.tensor_parallel[2] == "works"
    assert summary.tensor_parallel[8].startswith("TP=8: config.json: num_attention_heads=4")


def test_problems_are_counted(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "model-00002-of-00002.safetensors").unlink()

    assert inspect_model(model).problems == 2, "the shard, and the layer that was in it"


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(QuantError, match=r"config\.json is missing"):
        inspect_model(tmp_path)


def test_fp8_linears_are_told_apart(tmp_path):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group}}
    model = write_lookalike(tmp_path / "model", "LlamaForCausalLM", config, attention=fp8, mlp=fp8)

    summary = inspect_model(model)

    weights = LAYERS * sum(rows * columns for rows, columns in LINEARS.values())
    assert (summary.linears, summary.fp8_linears, summary.group_size, summary.problems) == (0, 14, None, 0)
    assert summary.bytes_by_kind["FP8 linears"] == weights + 14 * 4
    assert summary.parameters == weights + 2 * VOCAB * HIDDEN + LAYERS * HIDDEN
    assert summary.shapes[f"gate_proj [{FFN}, {HIDDEN}] FP8 per tensor"] == LAYERS
