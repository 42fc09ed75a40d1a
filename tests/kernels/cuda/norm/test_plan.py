"""How a norm is cut into blocks: a pure function, so no GPU is needed."""

import re
from pathlib import Path

import pytest

from kernels.tools.native import LIBRARY
from kernels.tools.native_norm import NormLibrary

THREADS, VECTORS, VECTORS_OF_RANKS = 512, 4, 3


@pytest.fixture(scope="module")
def native(build: Path) -> NormLibrary:
    return NormLibrary(build / LIBRARY.name)


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 8), (2, 14), (8, 14)])
def test_a_block_has_room_for_every_row_and_no_idle_warp(native: NormLibrary, ranks: int, numbers: int) -> None:
    for hidden in range(8, 16_384 + 8, 8):
        vectors, threads = native.plan(1, hidden, ranks)
        assert threads % 32 == 0
        assert threads <= THREADS
        assert vectors <= (VECTORS if ranks == 1 else VECTORS_OF_RANKS)
        needed = -(-hidden // numbers)
        assert needed <= vectors * threads
        assert (vectors - 1) * THREADS < needed
        assert vectors * (threads - 32) < needed


def test_rows_are_limited_where_ranks_meet(native: NormLibrary) -> None:
    """All blocks are on a V100 at once, and a slot holds the rows."""
    assert native.plan(100_000, 5120)
    assert native.plan(64, 8192, 2)
    assert native.plan(32, 16_384, 2)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ((0, 5120, 1), "rows: expected at least 1, got 0"),
        ((65, 5120, 2), "rows: expected at most 64 of ranks, got 65"),
        ((33, 16_384, 2), "rows: expected at most 32 of ranks, got 33"),
        ((1, 5120, 9), "ranks: expected at most 8, got 9"),
        ((1, 12, 1), "hidden: expected a multiple of 8, 8 to 16384, got 12"),
        ((1, 16_392, 1), "hidden: expected a multiple of 8, 8 to 16384, got 16392"),
    ],
)
def test_what_does_not_fit_is_named(native: NormLibrary, problem: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        native.plan(*problem)
