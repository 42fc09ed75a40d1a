"""The attention backend as vLLM drives it, without a GPU: the ops are stood in for by their float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from engine.layers import attention
from engine.layers.attention import Backend, Builder, Impl, Metadata
from engine.limits import DECODE_TOKENS
from kernels.tools import attention_reference

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 8
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float16)
VOLTA = DeviceCapability(7, 0)


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    """torch.ops.voltserve's attention on CPU tensors, in float64."""
    import voltserve_kernels  # noqa: F401 - registers the schemas

    library = torch.library.Library("voltserve", "IMPL")

    def paged_attention(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
        query_start: torch.Tensor, seq_lens: torch.Tensor, decode_query_len: int, max_query_len: int, scale: float,
        window: int, soft_cap: float, out: torch.Tensor,
    ) -> None:  # fmt: skip
        exact, _ = attention_reference.paged_attention(
            q, k_cache, v_cache, block_table, query_start, seq_lens, scale, window, soft_cap
        )  # fmt: skip
        rows = slice(int(query_start[0]), int(query_start[-1]))
        out[rows] = exact[rows].half()

    def reshape_and_cache(
        key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        kept = (slots >= 0).nonzero().flatten()
        block, token = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
        k_cache[block, token], v_cache[block, token] = key[kept], value[kept]

    library.impl("paged_attention", paged_attention, "CPU")
    library.impl("reshape_and_cache", reshape_and_cache, "CPU")
    yield
    library._destroy()


def allocated(num_blocks: int) -> torch.Tensor:
    """A layer's cache as vLLM's runner makes it: raw memory in the backend's order, seen in its shape."""
    shape = Backend.get_kv_cache_shape(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    order = Backend.get_kv_cache_stride_order()
    physical = torch.full([shape[i] for i in order], torch.nan, dtype=torch.float16)
    return physical.permute([order.index(i) for i in range(len(order))])


def common(query_lens: list[int], seq_lens: list[int], table: torch.Tensor, **changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    positions = [torch.arange(total - new, total) for new, total in zip(query_lens, seq_lens, strict=True)]
    slots = [table[r][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE for r, at in enumerate(positions)]
    usual: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "num_reqs": len(seq_lens),
        "num_actual_tokens": sum(query_lens),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": table,
        "slot_mapping": torch.cat(slots),
    }
    return CommonAttentionMetadata(**usual | changes)


def builder() -> Builder:
    return Builder(SPEC, ["layer"], SimpleNamespace(), torch.device("cpu"))


def impl(**changes: Any) -> Impl:
    usual: dict[str, Any] = {"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": 0.125, "num_kv_heads": KV_HEADS}
    return Impl(**usual | changes)


def step(layer: Impl, batch: CommonAttentionMetadata, cache: torch.Tensor, qkv: tuple[torch.Tensor, ...]) -> Any:
    query, key, value = qkv
    metadata = builder().build(0, batch)
    layer.do_kv_cache_update(None, key, value, cache, metadata.slot_mapping)
    return layer.forward(None, query, key, value, cache, metadata, torch.full_like(query, torch.nan))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_the_longest_query_of_each_kind_is_known_on_the_host(query_lens: list[int]) -> None:
    table = torch.zeros(len(query_lens), 5, dtype=torch.int32)
    made = builder().build(0, common(query_lens, query_lens, table))
    assert made.max_query_len == max(query_lens)
    assert made.decode_query_len == max((n for n in query_lens if n <= DECODE_TOKENS), default=0)
    # As plan_attention wants it: either there are long queries, or the longest is a short one.
    assert made.max_query_len > DECODE_TOKENS or made.max_query_len == made.decode_query_len


def test_metadata_is_the_runners_own_memory_so_that_a_captured_graph_sees_it_change() -> None:
    batch = common([1, 1], [5, 9], torch.arange(4, dtype=torch.int32).view(2, 2))
    made = builder().build_for_cudagraph_capture(batch)
    assert made.seq_lens is batch.seq_lens
    assert made.query_start_loc is batch.query_start_loc
    assert made.block_table is batch.block_table_tensor
    assert made.slot_mapping is batch.slot_mapping
    assert (made.decode_query_len, made.max_query_len) == (1, 1)


def test_another_group_of_layers_has_the_same_batch_in_other_blocks() -> None:
    batch = common([1, 20], [5, 20], torch.zeros(2, 3, dtype=torch.int32))
    first = builder().build(0, batch)
    table, slots = torch.ones(2, 3, dtype=torch.int32), torch.arange(21)
    second = builder().update_block_table(first, table, slots)
    assert second.block_table is table
    assert second.slot_mapping is slots
    assert (second.seq_lens, second.max_query_len) == (first.seq_lens, 20)
    assert first.block_table is batch.block_table_tensor


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"expected causal attention.*TRITON_ATTN"):
        builder().build(0, common([2], [2], torch.zeros(1, 1, dtype=torch.int32), causal=False))


def test_graphs_are_declared_for_batches_of_equal_queries() -> None:
    assert Builder.get_cudagraph_support(SimpleNamespace(), SPEC) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (11, 20.0)])
def test_a_prompt_in_chunks_and_tokens_after_it_give_what_one_pass_gives(
    window: int | None, soft_cap: float | None
) -> None:
    generator = torch.Generator().manual_seed(5)
    total = 45
    qkv = tuple(
        torch.randn(total, heads, HEAD_SIZE, generator=generator).half() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    table = torch.randperm(9, generator=generator).int().view(1, 9)
    layer = impl(sliding_window=window, logits_soft_cap=soft_cap)
    whole = step(layer, common([total], [total], table), allocated(9), qkv)
    cache, pieces, done = allocated(9), [], 0
    for new in (13, 24, 1, 1, 6):
        part = tuple(t[done : done + new] for t in qkv)
        done += new
        pieces.append(step(layer, common([new], [done], table), cache, part))
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=0)
    # And one pass is plain attention.
    query, key, value = (t.double().transpose(0, 1) for t in qkv)
    score = query @ key.repeat_interleave(HEADS // KV_HEADS, 0).mT * 0.125
    score = soft_cap * (score / soft_cap).tanh() if soft_cap else score
    at = torch.arange(total)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or total))
    weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
    dense = weight @ value.repeat_interleave(HEADS // KV_HEADS, 0)
    torch.testing.assert_close(whole, dense.transpose(0, 1).half())


def test_padding_of_a_graphs_batch_is_neither_cached_nor_computed() -> None:
    """vLLM pads to a captured size: requests of no tokens, slots of -1, rows of no request."""
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    batch = common([3, 0], [3, 0], table, num_actual_tokens=5)
    batch.slot_mapping = torch.cat([batch.slot_mapping, torch.tensor([-1, -1])])
    qkv = tuple(torch.ones(5, heads, HEAD_SIZE, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache = allocated(3)
    out = step(impl(), batch, cache, qkv)
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()
    assert int(cache.isfinite().sum()) == 2 * 3 * KV_HEADS * HEAD_SIZE


def test_a_step_without_requests_is_zero() -> None:
    query = torch.ones(2, HEADS, HEAD_SIZE, dtype=torch.float16)
    out = impl().forward(None, query, query, query, torch.empty(0), None, torch.full_like(query, torch.nan))
    assert not out.any()


def test_both_ops_trace_without_computing() -> None:
    """torch.compile and vLLM's profiling see the ops through their fake implementations."""
    with FakeTensorMode():
        cache = allocated(2)
        qkv = tuple(torch.empty(3, heads, HEAD_SIZE, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        layer = impl()
        table, starts, lens = torch.zeros(1, 1).int(), torch.zeros(2).int(), torch.zeros(1).int()
        metadata = Metadata(3, 3, 3, starts, lens, table, torch.zeros(3).long())
        layer.do_kv_cache_update(None, *qkv[1:], cache, metadata.slot_mapping)  # type: ignore[call-arg]
        assert layer.forward(None, *qkv, cache, metadata, torch.empty_like(qkv[0])).shape == qkv[0].shape  # type: ignore[arg-type, call-arg]


def test_keys_and_values_lie_as_the_ops_want_them() -> None:
    cache = allocated(5)
    keys, values = cache.unbind(1)
    assert cache.shape == (5, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    assert keys.stride() == values.stride()
    # A head's positions of a block are in a row.
    assert keys.stride()[1:] == (HEAD_SIZE, BLOCK_SIZE * HEAD_SIZE, 1)
    layers_too = Backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert sorted(layers_too) == list(range(6))


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [0.5] * HEADS},
        {"kv_cache_dtype": "fp8"},
        {"attn_type": "encoder_only"},
        {"sinks": torch.zeros(HEADS)},
        {"use_alibi_sqrt": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_layer_that_asks_for_more_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"got one with {next(iter(changes))}; pass --attention-backend"):
        impl(**changes)


def test_quantized_output_is_refused() -> None:
    query = torch.ones(1, HEADS, HEAD_SIZE, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="quantized"):
        impl().forward(None, query, query, query, torch.empty(0), None, query, output_scale=torch.ones(1))


def test_vllm_finds_the_backend_under_custom() -> None:
    attention.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is Backend
    assert AttentionBackendEnum[Backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert Backend.get_impl_cls() is Impl
    assert Backend.get_builder_cls() is Builder


def refusals(monkeypatch: pytest.MonkeyPatch, *, built: bool = True, **changes: Any) -> list[str]:
    monkeypatch.setattr(attention, "kernel_devices", lambda: ["cpu", "cuda"] if built else ["cpu"])
    usual: dict[str, Any] = {
        "head_size": 128, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": VOLTA, "attn_type": "decoder",
    }  # fmt: skip
    found: list[str] = Backend.validate_configuration(**usual | changes)
    return found


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 784, None])
def test_vllm_may_give_it_these_layers(monkeypatch: pytest.MonkeyPatch, head_size: int, block_size: int | None) -> None:
    assert refusals(monkeypatch, head_size=head_size, block_size=block_size) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 112}, "head_size"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 12}, "block_size"),
        ({"has_sink": True}, "sinks"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"device_capability": DeviceCapability(6, 1)}, "compute capability"),
        ({"built": False}, "no code for GPUs"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_vllm_is_told_why_not(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    found = refusals(monkeypatch, **changes)
    assert len(found) == 1
    assert reason in found[0]
