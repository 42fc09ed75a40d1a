import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.errors import QuantError
from quant.evaluate.local import load_local
from quant.formats.compressed_tensors import read_linear

DOWN = "model.layers.1.mlp.down_proj"


def test_quantized_weights_are_dequantized_and_the_rest_is_as_stored(source, quantized):
    model = load_local(quantized).model

    stored = load_file(quantized / "model.safetensors")
    parts = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(DOWN)}
    assert torch.equal(model.get_submodule(DOWN).weight, read_linear(parts, DOWN, 16).dequantize())
    assert torch.equal(model.model.norm.weight, stored["model.norm.weight"].float())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not model.training
    assert torch.equal(model.model.embed_tokens.weight, load_local(source).model.model.embed_tokens.weight)


def test_scores_are_those_of_the_continuation_alone(source):
    model = load_local(source)

    total = model.score("the fox", " jumps")

    ids = model.encode("the fox jumps")
    scores = model.model(ids[None]).logits[0].detach().log_softmax(-1)
    expected = sum(float(scores[place - 1, ids[place]]) for place in range(7, 13))
    assert total == pytest.approx(expected, rel=1e-4)
    assert model.score("the fox", " j") > total


def test_a_token_across_the_seam_counts_to_the_continuation(source):
    model = load_local(source)

    class Merging:
        """Reads "x=" as one token wherever both stand together."""

        def __call__(self, text, verbose):
            return {"input_ids": [10 if part == "x=" else 5 for part in text.replace("x=", "|x=|").split("|") if part]}

    merged = type(model)(model.name, model.model, Merging())
    scores = model.model(torch.tensor([[5, 10]])).logits[0].detach().log_softmax(-1)
    assert merged.score("ax", "=") == pytest.approx(float(scores[0, 10]), rel=1e-4)


def test_generation_is_greedy(source):
    model = load_local(source)

    text = model.generate("the fox", 5)

    ids = model.encode("the fox")
    for _ in range(5):
        ids = torch.cat([ids, model.model(ids[None]).logits[0, -1].argmax()[None]])
    assert text == model.tokenizer.decode(ids[7:], skip_special_tokens=True)


def test_a_quantized_model_stops_where_its_source_does(source, quantized, tmp_path):
    for path in quantized.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((source / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, 7]}))

    assert load_local(tmp_path).model.generation_config.eos_token_id == [1, 7]


def test_w4a4_rounds_the_inputs_of_quantized_linears(quantized):
    model, rounded = load_local(quantized).model, load_local(quantized, quantize_activations=True).model
    seen = {}
    for name, one in (("exact", model), ("rounded", rounded)):
        one.get_submodule(DOWN).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: inputs[0]})
        )
        one(torch.arange(20)[None])

    blocks = seen["rounded"].view(-1, 16)
    assert all(len(block.abs().unique()) <= 8 for block in blocks)
    assert any(len(block.abs().unique()) > 8 for block in seen["exact"].view(-1, 16))


def test_w4a4_of_a_16_bit_model_is_refused(source):
    with pytest.raises(QuantError, match=r"source: expected an NVFP4 model for W4A4, got a 16-bit one"):
        load_local(source, quantize_activations=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is not one of the model's"),
    ],
)
def test_a_model_whose_tensors_do_not_fit_is_refused(quantized, tmp_path, change, message):
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((quantized / name).read_bytes())

    with pytest.raises(QuantError, match=message):
        load_local(tmp_path)


def test_an_architecture_unknown_to_transformers_is_refused(quantized, tmp_path):
    for path in quantized.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "imaginary"}))

    with pytest.raises(QuantError, match="expected a model, got"):
        load_local(tmp_path)
