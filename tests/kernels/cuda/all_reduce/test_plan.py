"""How an all-reduce is cut into blocks: a pure function, so no GPU is needed."""

from pathlib import Path

import pytest
import torch

from engine.collective.all_reduce import TRIED
from kernels.tools.native import LIBRARY
from kernels.tools.native_all_reduce import BLOCKS, ReduceLibrary

LARGEST = 1 << 20


@pytest.fixture(scope="module")
def native(build: Path) -> ReduceLibrary:
    return ReduceLibrary(build / LIBRARY.name)


def test_every_size_has_blocks_that_are_all_on_the_gpu_at_once(native: ReduceLibrary) -> None:
    """Each thread has one line, of 7 float16 or 3 float32, while the blocks allow that."""
    for count in (*range(1, 2**16, 97), *range(2**16, LARGEST // 4, 9973), LARGEST // 4):
        assert native.plan(count) == min(BLOCKS, -(-count // (256 * 7)))
        assert native.plan(count, half=False) == min(BLOCKS, -(-count // (256 * 3)))
    assert native.plan(LARGEST // 2) == BLOCKS
    assert BLOCKS <= 80


@pytest.mark.parametrize(
    ("count", "ranks", "message"),
    [
        (0, 2, "bytes: expected 1 to 1048576, got 0"),
        (LARGEST // 2 + 1, 2, "bytes: expected 1 to 1048576, got 1048578"),
        (8, 1, "ranks: expected 2 to 8, got 1"),
        (8, 9, "ranks: expected 2 to 8, got 9"),
    ],
)
def test_what_does_not_fit_is_named(native: ReduceLibrary, count: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.plan(count, ranks)


def test_the_trial_at_the_start_gives_threads_one_line_and_several(native: ReduceLibrary) -> None:
    sizes = [count * dtype.itemsize for dtype, counts in TRIED for count in counts]
    blocks = [native.plan(count, half=dtype == torch.float16) for dtype, counts in TRIED for count in counts]
    assert 1 in blocks
    assert BLOCKS in blocks
    assert max(sizes) == LARGEST
