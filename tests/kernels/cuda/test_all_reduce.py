"""The all-reduce's plan, and what the compiler made of its kernels for sm_70."""

import re
from pathlib import Path

import pytest
import torch

from engine.collective.all_reduce import TRIED
from kernels.tools.native import LIBRARY
from kernels.tools.native_all_reduce import BLOCKS, ReduceLibrary
from perfmodel.sass_model import Instruction

LARGEST = 1 << 20
KERNELS = ["all_reduce_kernel<__half>", "all_reduce_kernel<float>"]


@pytest.fixture(scope="module")
def native(build: Path) -> ReduceLibrary:
    return ReduceLibrary(build / LIBRARY.name)


def test_every_size_has_blocks_that_are_all_on_the_gpu_at_once(native: ReduceLibrary) -> None:
    """A line a thread as long as that is so: 7 float16 or 3 float32."""
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_lines_data_and_turn_travel_in_one_access_of_the_whole_system(
    sass: dict[str, list[Instruction]], kernel: str
) -> None:
    (code,) = [code for name, code in sass.items() if kernel in name]
    names = [i.name for i in code]
    assert "STG.E.128.STRONG.SYS" in names
    assert names.count("LDG.E.128.STRONG.SYS") == 2  # lines that are on their way together
    assert not any(name.startswith("MEMBAR") for name in names)


@pytest.mark.parametrize("kernel", ["all_reduce_kernelI6__half", "all_reduce_kernelIf"])
def test_its_blocks_fit_a_v100s_processor(build: Path, kernel: str) -> None:
    report = (build / "all_reduce" / "all_reduce.o.ptxas").read_text()
    (registers,) = re.findall(rf"entry function '\w+{kernel}\w*' for 'sm_70'.*?Used (\d+)", report, re.DOTALL)
    assert 256 * int(registers) <= 65536
