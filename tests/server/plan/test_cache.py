import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.plan.cache import CPU_BLOCK, GPU_BLOCK, Cache, Groups, lay_out
from server.plan.weights import Split

from .models import model


def test_a_token_of_a_dense_model_is_keys_and_values_of_all_layers() -> None:
    cache = lay_out(model("32B"), Split(1), 2, GPU_BLOCK)
    assert cache.block_bytes == 16 * 64 * 2 * 8 * 128 * 2
    assert lay_out(model("32B"), Split(2), 2, GPU_BLOCK).block_bytes * 2 == cache.block_bytes
    assert lay_out(model("32B"), Split(16), 2, GPU_BLOCK).token_bytes == 2 * 128 * 2  # heads are copied
    assert lay_out(model("32B"), Split(1, 4), 2, GPU_BLOCK).pools == 16


def test_the_cache_s_size_is_whole_blocks() -> None:
    cache = Cache(CPU_BLOCK, 1536, 0, CPU_BLOCK * 1536, 30, Groups(1, 0, 0), 0)
    assert cache.tokens(2**30, 8192, 2048) == 182 * 128  # what the engine reports for SmolLM2 in float32 with 1 GiB


def test_a_hybrid_s_blocks_hold_a_recurrent_state() -> None:
    cache = lay_out(model("27B"), Split(2), 2, GPU_BLOCK)
    convolution = (2 * 128 * 16 + 128 * 48) // 2
    assert cache.state_bytes == 3 * convolution * 2 + 24 * 128 * 128 * 4
    assert cache.page_bytes >= cache.state_bytes
    assert (cache.page_bytes - cache.state_bytes) < 16 * cache.token_bytes
    assert (cache.pools, cache.groups) == (16, Groups(1, 0, 3))
    assert cache.blocks_of_sequence(1, 2048) == 1 + 3 * 2
    assert cache.blocks_of_sequence(cache.block_size + 1, 2048) == 2 + 3 * 2
    plain = lay_out(model("27B"), Split(2), 2, GPU_BLOCK, keeps_prefixes=False)
    assert plain.blocks_of_sequence(1, 2048) == 1 + 3


def test_a_hybrid_s_cache_is_reported_by_what_the_longest_sequence_holds() -> None:
    cache = Cache(512, 1024, 2**19, 512 * 1024, 8, Groups(1, 0, 3), 0, states=2)
    assert cache.tokens(512 * cache.block_bytes, 8192, 2048) == 190_650  # vLLM 0.28.0 with these blocks


@pytest.mark.parametrize(("full", "pools", "groups"), [(18, 18, (1, 1)), (6, 6, (1, 5)), (16, 20, (1, 1))])
def test_layers_are_grouped_as_vllm_groups_them(full: int, pools: int, groups: tuple[int, int]) -> None:
    kinds = ["full_attention"] * full + ["sliding_attention"] * (36 - full)
    cache = lay_out(model("8B", layer_types=kinds, sliding_window=1024), Split(1), 2, GPU_BLOCK)
    assert cache.pools == pools
    assert (cache.groups.full, cache.groups.sliding) == groups


def test_a_window_bounds_a_sequence_s_blocks() -> None:
    window = model("8B", sliding_window=1024, use_sliding_window=True)
    cache = lay_out(window, Split(1), 2, GPU_BLOCK)
    assert cache.blocks_of_sequence(16, 64) == 2
    assert cache.blocks_of_sequence(40960, 64) == cache.blocks_of_sequence(20000, 64) == (1023 + 64 + 15) // 16 + 1


@given(
    name=st.sampled_from(["8B", "32B", "27B"]),
    available=st.integers(2**26, 2**36),
    sequences=st.integers(1, 64),
)
def test_the_longest_length_is_the_longest(name: str, available: int, sequences: int) -> None:
    qwen = model(name)
    cache = lay_out(qwen, Split(1), 2, GPU_BLOCK)
    longest = cache.longest(available, sequences, 2048, qwen.positions)
    if longest:
        assert cache.sequences(available, longest, 2048) >= sequences
    if longest < qwen.positions:
        assert cache.sequences(available, longest + 1, 2048) < sequences
