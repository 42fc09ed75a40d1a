"""The norm's machine code for sm_70: wide accesses, few instructions, and a row that stays in registers."""

import re
from pathlib import Path

import pytest

from perfmodel.sass_model import Instruction

from ..compiled import REGISTERS, kernels

THREADS, VECTORS, VECTORS_OF_RANKS = 512, 4, 3


@pytest.mark.parametrize("vectors", range(1, VECTORS_OF_RANKS + 1))
def test_all_lines_are_requested_before_the_wait_for_one(sass: dict[str, list[Instruction]], vectors: int) -> None:
    """A line's data and epoch travel in one access: two lines per vector, in one loop that looks for all of them."""
    (code,) = [code for name, code in sass.items() if f"norm_kernel<(int){vectors}, (bool)1>" in name]
    names = [i.name for i in code]
    assert names.count("LDG.E.128.STRONG.SYS") == 2 * vectors
    assert names.count("STG.E.128.STRONG.SYS") >= 2 * vectors + 1  # the row's, and those that are renewed
    assert not any(name.startswith("MEMBAR") for name in names)


def test_the_usual_widths_are_few_instructions(sass: dict[str, list[Instruction]]) -> None:
    """One multiprocessor computes a whole row: up to 7168 numbers of ranks' rows, 4096 of others."""
    (ranks,) = [code for name, code in sass.items() if "norm_kernel<(int)1, (bool)1>" in name]
    (alone,) = [code for name, code in sass.items() if "norm_kernel<(int)1, (bool)0>" in name]
    assert len(ranks) <= 800
    assert len(alone) <= 360


@pytest.mark.parametrize("vectors", range(1, VECTORS + 1))
def test_without_ranks_rows_move_in_whole_vectors(sass: dict[str, list[Instruction]], vectors: int) -> None:
    (code,) = [code for name, code in sass.items() if f"norm_kernel<(int){vectors}, (bool)0>" in name]
    names = [i.name for i in code]
    assert sum(name.startswith("LDG.E.128") for name in names) == 3 * vectors
    assert sum(name.startswith("STG.E.128") for name in names) == 2 * vectors


def test_a_multiprocessor_holds_a_rows_block_and_the_row_stays_in_registers(build: Path) -> None:
    """Only rows of ranks above 14,336 numbers spill."""
    found = kernels(build, "norm/norm")
    assert len(found) == VECTORS + VECTORS_OF_RANKS
    for one in found:
        assert THREADS * one.registers <= REGISTERS
        widest_of_ranks = re.search(rf"norm_kernelILi{VECTORS_OF_RANKS}ELb1E", one.name)
        assert one.spill_loads <= (192 if widest_of_ranks else 0), one.name
