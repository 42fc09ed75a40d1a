from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quant.calibrate import CalibrationSettings, calibrate, draw_windows
from quant.calibration_text import Text, calibration_text, evaluation_text
from quant.errors import QuantError
from quant.methods import Method
from quant.quantize import quantize_checkpoint
from tests.quant.tiny_model import TEXT, tiny_model

DOWN, GATE = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj"
SETTINGS = CalibrationSettings(Text(TEXT, "foxes"), windows=5, window_tokens=32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "source")


def windows(source: Path) -> torch.Tensor:
    return draw_windows(AutoTokenizer.from_pretrained(source), SETTINGS)


def layer_inputs(source: Path, name: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen = []
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        for window in windows(source):
            model(window[None])
    return torch.cat(seen).double()


@pytest.mark.parametrize("name", [DOWN, GATE])
def test_without_gradients_it_is_the_inputs_second_moment(source, name):
    inputs = layer_inputs(source, name)

    sums = calibrate(source, [name], SETTINGS, gradients=False, diagonal=False)

    torch.testing.assert_close(sums[name].double(), inputs.t() @ inputs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_diagonal_is_the_matrix_s(source, gradients):
    whole, diagonal = (
        calibrate(source, [DOWN, GATE], SETTINGS, gradients=gradients, diagonal=diagonal) for diagonal in (False, True)
    )

    for name in (DOWN, GATE):
        torch.testing.assert_close(diagonal[name], whole[name].diagonal(), rtol=1e-4, atol=1e-7)


def test_saliency_is_the_expected_squared_gradient_of_the_weights(source):
    """With one token per window, the weight's gradient is one outer product."""
    settings = CalibrationSettings(Text(TEXT, "foxes"), windows=40, window_tokens=1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = torch.zeros(96)
    for index, window in enumerate(draw_windows(AutoTokenizer.from_pretrained(source), settings)):
        model.zero_grad()
        logits = model(window[None]).logits[0]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(index))[:, 0]
        torch.nn.functional.cross_entropy(logits, drawn).backward()
        expected += model.get_submodule(DOWN).weight.grad.square().mean(0)

    sums = calibrate(source, [DOWN], settings, gradients=True, diagonal=True)

    torch.testing.assert_close(sums[DOWN], expected, rtol=1e-3, atol=1e-9)


def test_it_is_the_same_every_time_on_any_number_of_threads(source):
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(calibrate(source, [DOWN], SETTINGS, gradients=True, diagonal=False)[DOWN])
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_seed_picks_the_windows(source):
    tokenizer = AutoTokenizer.from_pretrained(source)
    picked = {
        seed: draw_windows(tokenizer, CalibrationSettings(Text(TEXT, "foxes"), 4, 16, seed)).tolist() for seed in (0, 1)
    }

    assert picked[0] != picked[1]
    assert picked[0] == draw_windows(tokenizer, CalibrationSettings(Text(TEXT, "foxes"), 4, 16, 0)).tolist()
    characters = tokenizer.convert_ids_to_tokens(picked[1][0])
    assert "".join(characters) in TEXT


def test_a_text_too_short_says_how_much_there_is(source):
    settings = CalibrationSettings(Text("words", "a.txt"), windows=2, window_tokens=16)

    with pytest.raises(QuantError, match=r"a\.txt: expected 2 windows of 16 tokens, got 5 tokens"):
        calibrate(source, [DOWN], settings, gradients=False, diagonal=False)


def test_a_module_that_is_no_linear_of_the_model_is_named(source):
    with pytest.raises(QuantError, match=r"model\.embed_tokens: expected a linear layer of this name"):
        calibrate(source, ["model.embed_tokens"], SETTINGS, gradients=False, diagonal=False)


@pytest.mark.parametrize(
    "method", [Method("quasar"), Method("quasar", compensate=True), Method("mse", compensate=True)]
)
def test_calibrated_methods_err_less_in_the_model_s_outputs_than_maxabs(source, tmp_path, method):
    from quant.evaluate.local import load_local
    from quant.evaluate.text import measure_text

    quantize_checkpoint(source, tmp_path / "plain", method=Method("maxabs"))
    quantize_checkpoint(source, tmp_path / "better", method=method, calibration=SETTINGS)

    reference = load_local(source)
    candidates = {name: load_local(tmp_path / name) for name in ("plain", "better")}
    text = Text("pack my box with five dozen liquor jugs. " * 20, "jugs")
    measured = measure_text(candidates, text, reference=reference, tokens=320, window=64)
    better, plain = measured["better"].kl, measured["plain"].kl
    assert better is not None
    assert plain is not None
    assert better < 0.8 * plain


def test_a_stopped_calibrated_run_does_not_calibrate_again(source, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.what == "quantizing":
            raise Stopped

    options: dict[str, Any] = {"method": Method("quasar", compensate=True), "calibration": SETTINGS}
    quantize_checkpoint(source, tmp_path / "whole", **options)
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop, **options)

    monkeypatch.setattr("quant.quantize.calibrate", lambda *_, **__: pytest.fail("calibrated twice"))
    quantize_checkpoint(source, tmp_path / "out", **options)

    whole, out = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert whole == out


def test_the_default_texts_are_long_and_different():
    calibration, evaluation = calibration_text(), evaluation_text()

    assert len(calibration.content) > 500_000
    assert len(evaluation.content) > 400_000
    assert calibration.sha256 != evaluation.sha256
    assert evaluation.content[:2000] not in calibration.content


@pytest.mark.parametrize("content", [b"\xff\xfe\xfa", b" \n", None])
def test_a_text_that_cannot_be_used_is_refused_by_name(tmp_path, content):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(QuantError, match=r"text\.txt: expected"):
        calibration_text(path)
