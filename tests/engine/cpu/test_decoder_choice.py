"""Which steps and which attention layers the operation for all decoder layers takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType

from engine.cpu import decoder as cpu_decoder
from engine.cpu.attention import Attention
from engine.cpu.decoder import Decoder, Unfit


def takes(monkeypatch: pytest.MonkeyPatch, tokens: int, *, per_layer: bool = True, **of_metadata: Any) -> bool:
    metadata = {"causal": True, "num_actual_tokens": tokens, "max_query_len": 1, "max_seq_len": 100}
    step: Any = SimpleNamespace(**metadata | of_metadata)
    context = SimpleNamespace(attn_metadata={"first": step} if per_layer else None)
    monkeypatch.setattr(cpu_decoder, "get_forward_context", lambda: context)
    decoder = Decoder.__new__(Decoder)
    decoder._attention = [SimpleNamespace(layer_name="first")]
    taken = decoder._metadata(torch.zeros(tokens))
    assert taken in (None, step)
    return taken is step


@pytest.mark.parametrize(
    ("tokens", "of_metadata"),
    [(1, {}), (64, {}), (16, {"max_seq_len": 10**6}), (50, {"max_query_len": 50}), (64, {"max_query_len": 9})],
)
def test_steps_of_few_tokens_are_taken(
    monkeypatch: pytest.MonkeyPatch, tokens: int, of_metadata: dict[str, Any]
) -> None:
    assert takes(monkeypatch, tokens, **of_metadata)


@pytest.mark.parametrize(
    ("tokens", "of_metadata"),
    [
        (65, {}),
        (50, {"max_query_len": 50, "max_seq_len": 1000}),  # a long context read fifty times
        (1, {"causal": False}),
        (3, {"num_actual_tokens": 2}),
        (3, {"per_layer": False}),  # warming up
    ],
)
def test_other_steps_are_left(monkeypatch: pytest.MonkeyPatch, tokens: int, of_metadata: dict[str, Any]) -> None:
    assert not takes(monkeypatch, tokens, **of_metadata)


def attention(head_size: int = 64, dtype: torch.dtype = torch.float32, **of_impl: Any) -> Any:
    plain: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    impl = Attention(4, head_size, 0.1, 2, **plain | of_impl)
    return SimpleNamespace(impl=impl, head_size=head_size, kv_cache_torch_dtype=dtype)


def test_plain_attention_is_taken() -> None:
    cpu_decoder._need_attention(attention())


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ({"sliding_window": 512}, "window"),
        ({"alibi_slopes": [0.5, 0.25, 0.5, 0.25]}, "biases"),
        ({"logits_soft_cap": 30.0}, "biases"),
        ({"sinks": torch.zeros(4)}, "biases"),
        ({"kv_sharing_target_layer_name": "other"}, "biases"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "not causal"),
        ({"dtype": torch.float16}, "not in float32"),
        ({"head_size": 80}, "heads of 80 are no multiple of 32"),
    ],
)
def test_other_attention_is_left_and_the_reason_given(layer: dict[str, Any], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        cpu_decoder._need_attention(attention(**layer))
