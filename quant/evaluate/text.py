"""Perplexity and KL divergence on a text, over sliding windows.

Windows of `window` tokens advance by half a window. Each window scores the half that is new; the first scores all. So
every token is predicted from at least half a window, except those of the first half-window. After each token, let p be
the source's distribution and q the model's:

    perplexity = exp(mean of -ln q(next token of the text))
    KL         = mean of sum_v p(v) ln(p(v) / q(v)),    in nats per token
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.local import LocalModel
from quant.parallel import map_single_threaded
from quant.progress import OnProgress, Progress, ignore_progress


@dataclass(frozen=True)
class TextResult:
    """`tokens` scored; `bits_per_byte` does not depend on the tokenizer.

    Against the source, None without one: `kl` (mean), `kl_99` (99th percentile of tokens), `same_top` (share of tokens
    whose most likely successor is the same), `perplexity_ratio`.
    """

    tokens: int
    perplexity: float
    bits_per_byte: float
    kl: float | None = None
    kl_99: float | None = None
    same_top: float | None = None
    perplexity_ratio: float | None = None


def measure_text(
    models: Mapping[str, LocalModel],
    text: Text,
    *,
    reference: LocalModel | None,
    tokens: int = 4096,
    window: int = 512,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, TextResult]:
    """Each model's result on the first `tokens` tokens of `text`, read by the first model's tokenizer.

    Raises QuantError when the text is shorter than a window or the vocabularies differ.
    """
    first = reference or next(iter(models.values()))
    ids = first.encode(text.content)[:tokens]
    if len(ids) < window:
        raise QuantError(f"{text.source}: expected at least {window} tokens, got {len(ids)}", "Name a longer text")
    scored_text = first.tokenizer.decode(ids[1:])
    spans = sliding_windows(len(ids), window)
    done = 0

    def measure(span: tuple[int, int, int]) -> dict[str, _Scores]:
        nonlocal done
        start, stop, new = span
        piece, following = ids[start:stop], ids[new:stop]
        rows = slice(new - start - 1, stop - start - 1)
        # Copied, so that the whole window's scores can be freed.
        source = None if reference is None else reference.log_probabilities(piece)[rows].clone()
        scores = {}
        for name, model in models.items():
            # If the source is among the models, it is not run twice.
            ours = source if source is not None and model is reference else model.log_probabilities(piece)[rows]
            scores[name] = _score(ours, following, source)
        done += 1
        on_progress(Progress("measuring on text", done, len(spans), "windows"))
        return scores

    parts = map_single_threaded(measure, spans)
    bytes_scored = len(scored_text.encode())
    return {name: _result([part[name] for part in parts], bytes_scored) for name in models}


def sliding_windows(tokens: int, window: int) -> list[tuple[int, int, int]]:
    """(start, stop, new): read start..stop, score tokens new..stop; every token from 1 on is scored once."""
    step = window // 2
    spans = [(0, min(window, tokens), 1)]
    while spans[-1][1] < tokens:
        start = spans[-1][0] + step
        spans.append((start, min(start + window, tokens), spans[-1][1]))
    return spans


@dataclass(frozen=True)
class _Scores:
    """Measures of some tokens, float64 [T] each. Without a source the last three are empty."""

    loss: torch.Tensor
    source_loss: torch.Tensor
    kl: torch.Tensor
    same_top: torch.Tensor


def _score(ours: torch.Tensor, following: torch.Tensor, source: torch.Tensor | None) -> _Scores:
    if ours.shape[0] != len(following):
        raise ValueError(f"ours: expected {len(following)} rows, got {ours.shape[0]}")
    loss = -ours.gather(-1, following[:, None])[:, 0].double()
    empty = torch.empty(0, dtype=torch.float64)
    if source is None:
        return _Scores(loss, empty, empty, empty)
    if source.shape != ours.shape:
        raise QuantError(
            f"expected a source of the same vocabulary, got {source.shape[1]} tokens against {ours.shape[1]}",
            "Compare a model with the one it was made from",
        )
    kl = (source.exp() * (source - ours)).sum(-1).double().clamp(min=0)
    same = (source.argmax(-1) == ours.argmax(-1)).double()
    return _Scores(loss, -source.gather(-1, following[:, None])[:, 0].double(), kl, same)


def _result(parts: list[_Scores], bytes_scored: int) -> TextResult:
    loss, source_loss, kl, same = (
        torch.cat([getattr(part, field) for part in parts]) for field in ("loss", "source_loss", "kl", "same_top")
    )
    total = float(loss.sum())
    result = TextResult(len(loss), math.exp(total / len(loss)), total / math.log(2) / bytes_scored)
    if not len(kl):
        return result
    return TextResult(
        result.tokens,
        result.perplexity,
        result.bits_per_byte,
        kl=float(kl.mean()),
        kl_99=float(kl.quantile(0.99)),
        same_top=float(same.mean()),
        perplexity_ratio=math.exp((total - float(source_loss.sum())) / len(loss)),
    )
