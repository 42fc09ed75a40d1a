"""The threads that the CPU's ops work with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from .test_nvfp4_linear import matrix, packed

OPS = torch.ops.voltserve


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    yield
    OPS.set_cpu_threads(torch.get_num_threads())


@pytest.mark.parametrize("rows", [1, 17, 300, 2000])
def test_results_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    operands = packed(matrix(rows, 576))
    x = torch.randn(8, 576)
    OPS.set_cpu_threads(1)
    alone = OPS.nvfp4_linear(x, *operands)
    for threads in (2, 3, 2, 8, 1):
        OPS.set_cpu_threads(threads)
        for _ in range(20):
            assert torch.equal(OPS.nvfp4_linear(x, *operands), alone)


def test_calls_from_several_threads_at_once_do_not_disturb_each_other() -> None:
    OPS.set_cpu_threads(3)
    operands = packed(matrix(640, 576))
    inputs = [torch.randn(4, 576) for _ in range(16)]
    expected = [OPS.nvfp4_linear(x, *operands) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            got = list(pool.map(lambda x: OPS.nvfp4_linear(x, *operands), inputs))
            assert all(map(torch.equal, got, expected))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """The engine process is forked off one that may have computed already."""
    OPS.set_cpu_threads(2)
    operands = packed(matrix(640, 576))
    x = torch.randn(4, 576)
    expected = OPS.nvfp4_linear(x, *operands)
    child = os.fork()
    if child == 0:
        right = all(torch.equal(OPS.nvfp4_linear(x, *operands), expected) for _ in range(50))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_threads_are_refused() -> None:
    with pytest.raises(RuntimeError, match="threads: expected at least 1, got 0"):
        OPS.set_cpu_threads(0)
