"""The plan of the norm between products, and what the compiler made of its kernels for sm_70."""

import re
from pathlib import Path

import pytest

from kernels.tools.native import LIBRARY
from kernels.tools.native_norm import NormLibrary
from perfmodel.sass_model import Instruction

THREADS, UNITS, UNITS_OF_RANKS = 512, 4, 3


@pytest.fixture(scope="module")
def native(build: Path) -> NormLibrary:
    return NormLibrary(build / LIBRARY.name)


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 8), (2, 14), (8, 14)])
def test_a_block_has_room_for_every_row_and_no_idle_warp(native: NormLibrary, ranks: int, numbers: int) -> None:
    for hidden in range(8, 16_384 + 8, 8):
        vectors, threads = native.plan(1, hidden, ranks)
        assert threads % 32 == 0
        assert threads <= THREADS
        assert vectors <= (UNITS if ranks == 1 else UNITS_OF_RANKS)
        needed = -(-hidden // numbers)
        assert needed <= vectors * threads
        assert (vectors - 1) * THREADS < needed
        assert vectors * (threads - 32) < needed


def test_rows_are_limited_where_ranks_meet(native: NormLibrary) -> None:
    """To blocks that are all on a V100 at once, and to what a slot holds."""
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


@pytest.mark.parametrize("vectors", range(1, UNITS_OF_RANKS + 1))
def test_all_lines_are_asked_for_before_one_is_waited_for(sass: dict[str, list[Instruction]], vectors: int) -> None:
    """A line's data and epoch travel in one access: two lines a vector, in one loop that looks for all of them."""
    (code,) = [code for name, code in sass.items() if f"norm_kernel<(int){vectors}, (bool)1>" in name]
    names = [i.name for i in code]
    assert names.count("LDG.E.128.STRONG.SYS") == 2 * vectors
    assert names.count("STG.E.128.STRONG.SYS") >= 2 * vectors + 1  # of the row, and renewed places
    assert not any(name.startswith("MEMBAR") for name in names)


def test_the_usual_widths_are_few_instructions(sass: dict[str, list[Instruction]]) -> None:
    """A row's all wait for one multiprocessor: up to 7168 numbers of ranks' rows, 4096 of others."""
    (ranks,) = [code for name, code in sass.items() if "norm_kernel<(int)1, (bool)1>" in name]
    (alone,) = [code for name, code in sass.items() if "norm_kernel<(int)1, (bool)0>" in name]
    assert len(ranks) <= 800
    assert len(alone) <= 360


@pytest.mark.parametrize("vectors", range(1, UNITS + 1))
def test_without_ranks_rows_move_in_whole_vectors(sass: dict[str, list[Instruction]], vectors: int) -> None:
    (code,) = [code for name, code in sass.items() if f"norm_kernel<(int){vectors}, (bool)0>" in name]
    names = [i.name for i in code]
    assert sum(name.startswith("LDG.E.128") for name in names) == 3 * vectors
    assert sum(name.startswith("STG.E.128") for name in names) == 2 * vectors


def test_a_rows_block_fits_a_v100s_processor_and_keeps_its_row_in_registers(build: Path) -> None:
    """But for rows of ranks above 14,336, which spill."""
    report = (build / "norm" / "norm.o.ptxas").read_text()
    found = re.findall(
        r"norm_kernelILi(\d)ELb(\d)E\w*' for 'sm_70'.*?(\d+) bytes spill loads.*?Used (\d+)", report, re.DOTALL
    )
    assert len(found) == UNITS + UNITS_OF_RANKS
    for vectors, reduce, spilled, registers in found:
        assert THREADS * int(registers) <= 65536
        allowed = 192 if reduce == "1" and int(vectors) == UNITS_OF_RANKS else 0
        assert int(spilled) <= allowed, f"{vectors} vectors, reduce={reduce}"
