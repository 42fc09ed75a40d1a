from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, ModuleList
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from engine.cpu import attention as cpu_attention
from engine.cpu.attention import Attention, Backend, Builder, Metadata, openmp_threads, spare_openmp
from lookalikes.linears import member
from tests.engine.conftest import AsRank
from tests.engine.made_layers import load, make


@pytest.fixture(autouse=True)
def process_as_before(as_rank: AsRank, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    as_rank(0, 1)
    monkeypatch.setattr(cpu_attention, "_threads", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


PAGE = 16
LAYER = Module()  # that attention belongs to


def batch(new: list[int], lengths: list[int], causal: bool = True) -> tuple[CommonAttentionMetadata, int]:
    """A step of requests with `new` tokens and `lengths` positions, whose pages lie in disorder; and their number."""
    each = -(-max(lengths) // PAGE)
    pages = torch.randperm(each * len(lengths), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = pages.view(len(lengths), each)
    slots = [
        int(table[request, position // PAGE]) * PAGE + position % PAGE
        for request, (tokens, length) in enumerate(zip(new, lengths, strict=True))
        for position in range(length - tokens, length)
    ]
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        causal=causal,
    )
    return step, pages.numel()


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    cap: float = 0.0,
    slopes: list[float] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One request in float64, position by position: q [T, H, D], k and v [S, H_kv, D]."""
    tokens, heads, dim = q.shape
    length, group = len(k), heads // k.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for token in range(tokens):
        own = length - tokens + token
        first = max(0, own - window + 1) if window else 0
        seen = range(first, own + 1 if causal else length)
        for head in range(heads):
            keys, values = (tensor[seen.start : seen.stop, head // group].double() for tensor in (k, v))
            scores = keys @ q[token, head].double() * dim**-0.5
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores += slopes[head] * (torch.arange(seen.start, seen.stop) - own)
            sink = torch.empty(0) if sinks is None else sinks[head : head + 1]
            weights = torch.cat([scores, sink.double()]).softmax(0)[: len(scores)]
            out[token, head] = weights @ values
    return out


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "soft cap": {"logits_soft_cap": 2.0},
    "window and soft cap": {"sliding_window": 7, "logits_soft_cap": 3.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 80])
@pytest.mark.parametrize(
    ("new", "lengths"),
    [([1, 1, 1], [5, 40, 17]), ([3, 16], [19, 16]), ([30, 1], [30, 50]), ([20], [70])],
    ids=["decode", "few", "mixed", "later part of a prompt"],
)
def test_attention_over_pages_is_attention(
    kind: str, dtype: torch.dtype, dim: int, new: list[int], lengths: list[int]
) -> None:
    random = torch.Generator().manual_seed(7)
    step, pages = batch(new, lengths)
    options: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    attention = Attention(4, dim, dim**-0.5, 2, **options | KINDS[kind])
    cache = torch.full(Backend.get_kv_cache_shape(pages, PAGE, 2, dim), torch.nan, dtype=dtype)
    whole = [torch.randn(2, length, 2, dim, generator=random).to(dtype) for length in lengths]
    # What came before, written token by token as earlier steps did.
    earlier = batch(lengths, lengths)[0]
    keys, values = (torch.cat([one[part] for one in whole]) for part in (0, 1))
    attention.do_kv_cache_update(LAYER, keys, values, cache, earlier.slot_mapping)
    query = torch.randn(sum(new), 4, dim, generator=random).to(dtype)
    out = torch.full((sum(new), 4 * dim), torch.nan, dtype=dtype)
    metadata: Metadata = Builder.build(Builder.__new__(Builder), 0, step)
    latest = torch.cat([one[:, -tokens:] for one, tokens in zip(whole, new, strict=True)], dim=1)
    attention.forward(LAYER, query, latest[0], latest[1], cache, metadata, out)
    first = 0
    for one, tokens in zip(whole, new, strict=True):
        expected = reference(
            query[first : first + tokens],
            one[0],
            one[1],
            window=attention.sliding_window,
            cap=attention.logits_soft_cap,
            slopes=KINDS[kind].get("alibi_slopes"),
            sinks=KINDS[kind].get("sinks"),
        )
        got = out[first : first + tokens].view(tokens, 4, dim).double()
        precision = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(got, expected, atol=precision, rtol=precision)
        first += tokens


def test_an_encoder_sees_both_directions_and_keeps_no_cache() -> None:
    random = torch.Generator().manual_seed(8)
    options: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    attention = Attention(4, 32, 32**-0.5, 2, **options, attn_type=AttentionType.ENCODER_ONLY)
    q, k, v = (torch.randn(9, heads, 32, generator=random) for heads in (4, 2, 2))
    step, _ = batch([4, 5], [4, 5], causal=False)
    out = torch.empty(9, 128)
    cache = torch.empty(0)
    attention.do_kv_cache_update(LAYER, k, v, cache, step.slot_mapping)
    attention.forward(LAYER, q, k, v, cache, Builder.build(Builder.__new__(Builder), 0, step), out)
    for rows in (slice(0, 4), slice(4, 9)):
        expected = reference(q[rows], k[rows], v[rows], causal=False)
        torch.testing.assert_close(out[rows].view(-1, 4, 32).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_slot_of_padding_is_written_nowhere() -> None:
    options: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    for dtype in (torch.float32, torch.float16):
        cache = torch.zeros(Backend.get_kv_cache_shape(2, PAGE, 2, 32), dtype=dtype)
        ones = torch.ones(3, 2, 32, dtype=dtype)
        Attention(4, 32, 1.0, 2, **options).do_kv_cache_update(LAYER, ones, ones, cache, torch.tensor([-1, 17, -1]))
        assert cache.sum() == 2 * 2 * 32
        assert cache[1, 1, :, 1].eq(1).all()


def test_an_eight_bit_cache_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"got fp8_e4m3.*--kv-cache-dtype auto"):
        Attention(4, 32, 1.0, 2, alibi_slopes=None, sliding_window=None, kv_cache_dtype="fp8_e4m3")


def layer() -> Any:
    made = make("ColumnParallelLinear", 32, 8)
    load(made, member(8, 32, 5.0))
    made.quant_method.process_weights_after_loading(made)
    return made


def threads_after_a_step(monkeypatch: pytest.MonkeyPatch, tokens: int) -> int:
    monkeypatch.setattr(torch, "set_num_threads", lambda _threads: None)  # as vLLM's CPU worker does
    Builder.build(Builder.__new__(Builder), 0, batch([tokens], [tokens])[0])
    return torch.get_num_threads()


@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (16, 1), (17, 2), (2048, 2)])
def test_small_steps_take_one_thread(tokens: int, threads: int) -> None:
    assert openmp_threads(tokens, 2) == threads


def test_steps_choose_their_threads_once_a_model_on_kernels_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_after_a_step(monkeypatch, 1) == 2
    spare_openmp(ModuleList([layer(), layer()]))
    assert threads_after_a_step(monkeypatch, 1) == 1
    assert threads_after_a_step(monkeypatch, 100) == 2


def test_a_model_with_a_layer_that_needs_openmp_keeps_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = layer()
    dense.quant_method = UnquantizedLinearMethod()
    spare_openmp(ModuleList([layer(), dense]))
    assert threads_after_a_step(monkeypatch, 1) == 2
    spare_openmp(Linear(4, 4))
    assert threads_after_a_step(monkeypatch, 1) == 2


def test_vllm_is_given_our_backend_for_cpus() -> None:
    cpu_attention.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu_attention.Backend
    assert cpu_attention.Backend.get_builder_cls() is Builder
    assert cpu_attention.Backend.get_name() == "CPU_ATTN"
