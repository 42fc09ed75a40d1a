"""How attention is cut into blocks: a pure function, so no GPU is needed."""

import pytest

from engine.limits import HEAD_SIZES
from kernels.tools.native_attention import DECODE_TOKENS, AttentionLibrary, Plan


def step(attention: AttentionLibrary, requests: int = 8, new: int = 1, **changes: int) -> Plan:
    """A decoding step of a V100: `requests` with `new` tokens each."""
    usual = {
        "requests": requests, "tokens": requests * new, "decode_query_len": new, "max_query_len": new,
        "q_heads": 32, "kv_heads": 4, "head_dim": 128,
    }  # fmt: skip
    return attention.plan(**usual | changes)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("new", range(1, DECODE_TOKENS + 1))
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (6, 2), (5, 1), (64, 8), (64, 1), (71, 1)])
def test_every_row_of_a_key_head_has_a_place_in_a_decoding_block(
    attention: AttentionLibrary, head_dim: int, new: int, q_heads: int, kv_heads: int
) -> None:
    plan = step(attention, new=new, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    rows, shape = new * q_heads // kv_heads, plan.decode
    assert shape is not None
    # All in one block where that is possible, so that the cache is read once.
    assert plan.row_blocks == -(-rows // 64)
    assert shape.rows * plan.row_blocks >= rows
    assert shape.rows == 8 or rows > shape.rows // 2 or plan.row_blocks > 1
    assert shape.head_dim == head_dim
    assert plan.partial_rows == rows
    # The last block is found per group of splits, key head and block of rows, three times at most.
    assert plan.arrival_words == 3 * plan.splits * kv_heads * plan.row_blocks


@pytest.mark.parametrize("requests", [1, 2, 7, 8, 32, 255])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(32, 4), (64, 8), (12, 2), (32, 32)])
def test_splits_fill_the_gpu_and_each_request_has_one(
    attention: AttentionLibrary, requests: int, q_heads: int, kv_heads: int
) -> None:
    plan = step(attention, requests, q_heads=q_heads, kv_heads=kv_heads)
    assert plan.decode is not None
    places = 80 * plan.decode.blocks_per_processor // kv_heads
    assert plan.splits == (places if requests <= places // 2 else requests + places // 2)


def test_a_plan_does_not_know_lengths_so_captured_graphs_stay_right(attention: AttentionLibrary) -> None:
    """There is nothing in the problem that says how full the cache is."""
    assert step(attention) == step(attention)
    plan = step(attention)
    assert plan.partial_floats == plan.splits * 4 * plan.partial_rows * (128 + 2)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("query_lens", [[9], [100, 1, 8], [2048], [33] * 20, [9, 3000, 5]])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_every_long_querys_rows_have_a_tile(
    attention: AttentionLibrary, head_dim: int, query_lens: list[int], group: int
) -> None:
    short = max((n for n in query_lens if n <= DECODE_TOKENS), default=0)
    plan = attention.plan(len(query_lens), sum(query_lens), short, max(query_lens), 2 * group, 2, head_dim)
    needed = sum(-(-n * group // plan.prefill_rows) for n in query_lens if n > DECODE_TOKENS)
    assert needed <= plan.prefill_tiles <= needed + len(query_lens) + sum(query_lens) * group // plan.prefill_rows
    assert (plan.decode is not None) == (short > 0)


def test_each_kind_of_batch_says_why_it_is_computed_so(attention: AttentionLibrary) -> None:
    reasons = {
        attention.plan(2, tokens, decode, longest, 8, 2, 128).reason
        for tokens, decode, longest in ((2, 1, 1), (40, 0, 20), (21, 1, 20))
    }
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests: expected at least 1, got 0"),
        ({"tokens": 0}, "tokens: expected at least 1, got 0"),
        ({"head_dim": 112}, "head_dim: expected 64, 80, 96, 128 or 256, got 112"),
        ({"q_heads": 30}, "q_heads: expected a multiple of kv_heads, got 30"),
        ({"kv_heads": 0}, "kv_heads: expected at least 1, got 0"),
        ({"decode_query_len": 9}, "decode_query_len: expected 0 to 8, got 9"),
        ({"max_query_len": 2}, "max_query_len: expected decode_query_len, or more than 8, got 2"),
        ({"processors": 0}, "processors: expected at least 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_named(attention: AttentionLibrary, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(attention, **changes)
