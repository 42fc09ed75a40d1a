import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.local import load_local
from quant.evaluate.text import measure_text, sliding_windows

TEXT = Text("pack my box with five dozen liquor jugs. " * 10, "jugs")


@given(st.integers(2, 400), st.integers(2, 100))
def test_windows_score_every_token_but_the_first_once_with_half_a_window_before_it(tokens, window):
    spans = sliding_windows(tokens, window)

    scored = [token for _, stop, new in spans for token in range(new, stop)]
    assert scored == list(range(1, tokens))
    assert all(stop - start <= window for start, stop, _ in spans)
    assert all(new - start >= window // 2 for start, _, new in spans[1:])


def test_it_agrees_with_the_definition_in_float64(source, quantized):
    reference, model = load_local(source), load_local(quantized)

    measured = measure_text({"model": model}, TEXT, reference=reference, tokens=64, window=64)["model"]

    ids = model.encode(TEXT.content)[:64]
    ours, theirs = (one.model(ids[None]).logits[0].detach().double().log_softmax(-1)[:-1] for one in (model, reference))
    losses = [-scores[torch.arange(63), ids[1:]].mean() for scores in (ours, theirs)]
    assert measured.tokens == 63
    assert measured.perplexity == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert measured.perplexity_ratio == pytest.approx(math.exp(losses[0] - losses[1]), rel=1e-4)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert measured.kl == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert measured.kl_99 == pytest.approx(float(divergence.quantile(0.99)), rel=1e-3)
    assert measured.same_top == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()))
    assert measured.bits_per_byte == pytest.approx(float(losses[0]) / math.log(2), rel=1e-4)  # a token is a byte here


def test_a_model_does_not_differ_from_itself(source):
    model = load_local(source)

    measured = measure_text({"a": model}, TEXT, reference=model, tokens=200, window=64)["a"]

    assert (measured.kl, measured.same_top, measured.perplexity_ratio) == (0.0, 1.0, 1.0)


def test_without_a_source_only_the_text_itself_is_measured(source):
    measured = measure_text({"a": load_local(source)}, TEXT, reference=None, tokens=200, window=64)["a"]

    assert measured.perplexity > 1
    assert (measured.kl, measured.kl_99, measured.same_top, measured.perplexity_ratio) == (None,) * 4


def test_a_text_shorter_than_a_window_is_refused(source):
    with pytest.raises(QuantError, match=r"hi\.txt: expected at least 64 tokens, got 5"):
        measure_text({"a": load_local(source)}, Text("hello", "hi.txt"), reference=None, tokens=200, window=64)


def test_a_source_of_another_vocabulary_is_refused(source):
    model = load_local(source)

    class Wider(torch.nn.Module):
        def forward(self, ids):
            output = model.model(ids)
            output.logits = torch.nn.functional.pad(output.logits, (0, 3))
            return output

    wider = dataclasses.replace(model, model=Wider())
    with pytest.raises(QuantError, match="expected a source of the same vocabulary, got 103 tokens against 100"):
        measure_text({"a": model}, TEXT, reference=wider, tokens=100, window=64)
