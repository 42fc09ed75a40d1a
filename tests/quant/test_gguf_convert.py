import importlib.metadata
import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quant.errors import QuantError
from quant.gguf_convert import convert_gguf
from tests.quant.files import names_in
from tests.quant.tiny_gguf import HEAD_DIM, HIDDEN, LAYERS, TEMPLATE, TOKENS, weights, write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted")
    write_gguf(directory.parent / "tiny.gguf")
    convert_gguf(directory.parent / "tiny.gguf", directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(converted):
    return AutoTokenizer.from_pretrained(converted)


def test_a_whole_model_directory_is_written(converted):
    assert names_in(converted) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_weights_are_those_of_transformers_own_reader(converted, monkeypatch):
    # On Python 3.10 transformers does not find the package's metadata and asks the module, which does not say.
    monkeypatch.setattr(gguf, "__version__", importlib.metadata.version("gguf"), raising=False)
    theirs = AutoModelForCausalLM.from_pretrained(converted.parent, gguf_file="tiny.gguf", dtype=torch.float32)

    ours = load_file(converted / "model.safetensors")

    expected = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == torch.float16
        assert torch.equal(ours[name], tensor.half()), name


def test_transformers_loads_every_weight_of_the_directory_and_runs_it(converted):
    model, report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)

    assert {key: list(names) for key, names in report.items() if names} == {}
    assert model.dtype == torch.float16
    assert model.config.num_hidden_layers == LAYERS
    assert model.config.head_dim == HEAD_DIM
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.float()(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


def test_an_untied_head_is_converted_too(tmp_path):
    head = np.ones((len(TOKENS), HIDDEN), dtype=np.float32)
    write_gguf(tmp_path / "tiny.gguf", tensors={**weights(), "output.weight": head}, quantized=False)
    (tmp_path / "out").mkdir()

    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")

    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], torch.from_numpy(head).half()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_end_of_text_token_is_the_same_everywhere(converted, tokenizer):
    config, generation = (
        json.loads((converted / name).read_text()) for name in ("config.json", "generation_config.json")
    )

    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert config["eos_token_id"] == generation["eos_token_id"] == 2
    assert (tokenizer.bos_token_id, config["bos_token_id"], generation["bos_token_id"]) == (1, 1, 1)
    assert (tokenizer.pad_token_id, config["pad_token_id"], generation["pad_token_id"]) == (2, 2, 2)
    assert tokenizer.unk_token_id == 0


def test_config_holds_nothing_from_the_machine_that_made_it(converted):
    assert not [key for key in json.loads((converted / "config.json").read_text()) if key.startswith("_")]


@pytest.mark.parametrize("text", ["ab ab", "1/2 12", "中文 naïve ▁ ²\n\n\tend", " ", ""])
def test_every_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_words_are_merged_and_digits_are_not(tokenizer):
    assert tokenizer.tokenize("ab ab 12") == ["ab", "Ġab", "Ġ", "1", "2"]


def test_no_token_is_added_and_special_ones_are_single(tokenizer):
    assert tokenizer("ab").input_ids == [TOKENS.index("ab")]
    assert tokenizer("<|im_start|>ab<|im_end|>").input_ids == [1, TOKENS.index("ab"), 2]
    assert tokenizer.decode([1, TOKENS.index("ab"), 2], skip_special_tokens=True) == "ab"


def test_the_chat_template_is_the_file_s(converted, tokenizer):
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|im_start|>ab<|im_end|>"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, r"general\.architecture: expected 'llama', got 'qwen2'"),
        ({"pre": "gpt-2"}, r"tokenizer\.ggml\.pre: expected 'smollm', got 'gpt-2'"),
        ({"extra": ("llama.rope.scaling.factor", 2.0)}, r"llama\.rope\.scaling\.factor is unknown"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"rope_freqs\.weight: expected a Llama tensor"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(8, np.float32)}}, r"blk\.0\.attn_q\.bias: expected a Llama tensor"),
        (
            {"tensors": {"output_norm.weight": np.array([1e9], np.float32)}},
            r"output_norm\.weight: expected finite float16",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, options, message):
    write_gguf(tmp_path / "tiny.gguf", **options)

    with pytest.raises(QuantError, match=rf"tiny\.gguf: {message}"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a GGUF file at all"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    (tmp_path / "tiny.gguf").write_bytes(content)

    with pytest.raises(QuantError, match=r"tiny\.gguf: expected a GGUF file, got"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)
