import pytest

from quant import transformers_model
from quant.errors import QuantError
from quant.transformers_model import available_memory, load_model, load_tokenizer
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
