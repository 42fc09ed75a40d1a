import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quant import transformers_model
from quant.errors import QuantError
from quant.transformers_model import available_memory, load_model, load_tokenizer, model_from_tensors
from tests.quant.tiny_model import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loaded") / "source")


def test_a_model_is_loaded_for_inference_in_float32(source):
    model = load_model(source)

    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert not model.training


def test_a_model_larger_than_memory_is_refused_with_both_sizes(source, monkeypatch):
    monkeypatch.setattr(transformers_model, "available_memory", lambda: 10_000_000)

    assert load_model(source)
    with pytest.raises(QuantError, match=r"expected 0\.1 GB free to run the model in float32, got 0\.0 GB"):
        load_model(source, beside=100_000_000)


def test_available_memory_is_plausible():
    assert 100e6 < available_memory() < 100e12


def test_a_damaged_model_or_tokenizer_is_named(source, tmp_path):
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(QuantError, match=f"{tmp_path}: expected a model, got"):
        load_model(tmp_path)
    with pytest.raises(QuantError, match=f"{tmp_path}: expected a tokenizer, got"):
        load_tokenizer(tmp_path)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MIXTURES = {
    "Qwen": (Qwen3MoeForCausalLM, Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, **SIZES), "gate_proj"),
    "Mixtral": (MixtralForCausalLM, MixtralConfig(num_local_experts=4, **SIZES), "w1"),
}


@pytest.fixture(params=MIXTURES.values(), ids=list(MIXTURES))
def mixture(request, tmp_path):
    """A mixture of experts, and its tensors as checkpoints name them: expert by expert."""
    build, config, leaf = request.param
    torch.manual_seed(0)
    model = build(config).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(f".experts.3.{leaf}.weight" in name for name in tensors)
    return tmp_path, model, tensors


def test_experts_named_one_by_one_become_transformers_model(mixture):
    directory, model, tensors = mixture
    ids = torch.arange(20)[None]

    again = model_from_tensors(directory, tensors)

    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_missing_expert_is_named(mixture):
    directory, _, tensors = mixture
    name = next(name for name in tensors if ".experts.2." in name)

    with pytest.raises(QuantError, match=rf"{name.removesuffix('.weight')} is missing"):
        model_from_tensors(directory, {key: tensor for key, tensor in tensors.items() if key != name})
