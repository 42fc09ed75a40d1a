"""The all-reduce's plan, and what the compiler made of its kernels for sm_70."""

import re
from pathlib import Path

import pytest

from engine.all_reduce import TRIED
from kernels.tools.native import LIBRARY
from kernels.tools.native_all_reduce import BLOCKS, ReduceLibrary
from kernels.tools.sass_model import Instruction

LARGEST = 1 << 20
KERNELS = [
    f"all_reduce_{protocol}_kernel<{dtype}>" for protocol in ("lines", "chunks") for dtype in ("__half", "float")
]


@pytest.fixture(scope="module")
def native(build: Path) -> ReduceLibrary:
    return ReduceLibrary(build / LIBRARY.name)


@pytest.mark.parametrize(
    ("size", "protocol"),
    [(1, "lines"), (10_240, "lines"), (81_920, "chunks"), (327_680, "chunks"), (LARGEST, "chunks")],
)
def test_few_bytes_carry_their_flags_and_many_share_them(native: ReduceLibrary, size: int, protocol: str) -> None:
    plan = native.plan(size)
    assert plan.protocol == protocol
    assert plan.reason


def test_every_size_has_blocks_that_are_all_on_the_gpu_at_once(native: ReduceLibrary) -> None:
    """A line a thread, and senders and receivers in pairs."""
    for size in (*range(1, 2**17, 97), *range(2**17, LARGEST + 1, 9973), LARGEST):
        plan = native.plan(size)
        assert 1 <= plan.blocks <= BLOCKS
        if plan.protocol == "lines":
            assert plan.blocks * 256 * 8 >= size > (plan.blocks - 1) * 256 * 8
        else:
            assert plan.blocks % 2 == 0


@pytest.mark.parametrize(
    ("size", "ranks", "message"),
    [
        (0, 2, "bytes: expected 1 to 1048576, got 0"),
        (LARGEST + 1, 2, "bytes: expected 1 to 1048576, got 1048577"),
        (8, 1, "ranks: expected 2 to 8, got 1"),
        (8, 9, "ranks: expected 2 to 8, got 9"),
    ],
)
def test_what_does_not_fit_is_named(native: ReduceLibrary, size: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.plan(size, ranks)


def test_the_trial_at_the_start_goes_both_ways(native: ReduceLibrary) -> None:
    sizes = [count * dtype.itemsize for dtype, counts in TRIED for count in counts]
    assert {native.plan(size).protocol for size in sizes} == {"lines", "chunks"}
    assert max(sizes) == LARGEST


@pytest.mark.parametrize("kernel", KERNELS)
def test_data_and_flag_of_a_line_travel_in_one_access_of_the_whole_system(
    sass: dict[str, list[Instruction]], kernel: str
) -> None:
    (code,) = [code for name, code in sass.items() if kernel in name]
    names = [i.name for i in code]
    assert "STG.E.128.STRONG.SYS" in names
    assert "LDG.E.128.STRONG.SYS" in names
    fences = [name for name in names if name.startswith("MEMBAR")]
    assert bool(fences) == ("chunks" in kernel)


@pytest.mark.parametrize("kernel", ["all_reduce_lines_kernelI6__half", "all_reduce_chunks_kernelI6__half"])
def test_its_blocks_leave_room_beside_them(build: Path, kernel: str) -> None:
    report = (build / "all_reduce.o.ptxas").read_text()
    ((registers,),) = [re.findall(rf"entry function '\w+{kernel}\w*' for 'sm_70'.*?Used (\d+)", report, re.DOTALL)]
    assert 256 * int(registers) * 4 <= 65536
