"""The rotation's machine code for sm_70: what its speed and its exact bits rest on."""

import re
from pathlib import Path

import pytest

from perfmodel.sass_model import Instruction

from ..compiled import REGISTERS, kernels


@pytest.fixture(scope="session")
def code(sass: dict[str, list[Instruction]]) -> dict[str, list[Instruction]]:
    """Instructions by pairs of dimensions per lane, halves (0, 1), norms (0, 1)."""
    found = {}
    for name, instructions in sass.items():
        if arguments := re.search(r"rotate_kernel<\(int\)(\d), \(bool\)(\d), \(bool\)(\d)>", name):
            found["".join(arguments.groups())] = instructions
    return found


def test_there_is_one_for_each_head_size_rotation_and_norm(code: dict[str, list[Instruction]]) -> None:
    assert len(code) == 3 * 2 * 2


def test_products_are_rounded_before_they_are_added(code: dict[str, list[Instruction]]) -> None:
    for name, instructions in code.items():
        names = {one.name.split(".")[0] for one in instructions}
        assert {"HMUL2", "HADD2"} <= names, name
        assert "HFMA2" not in names, name


def test_all_loads_are_issued_before_the_first_wait(code: dict[str, list[Instruction]]) -> None:
    for name, instructions in code.items():
        if not name.endswith("1"):  # no norm, no sum
            continue
        names = [one.name for one in instructions]
        exchange = next(i for i, one in enumerate(names) if one.startswith("SHFL.BFLY"))
        assert not [one for one in names[exchange:] if one.startswith(("LDG", "LDL", "LDS"))], name


def test_few_instructions_lie_between_the_first_load_and_the_last_store(code: dict[str, list[Instruction]]) -> None:
    """A warp alone on its scheduler: each takes some 5 cycles of 1.38 GHz."""
    instructions = [one.name for one in code["211"]]
    first = next(i for i, name in enumerate(instructions) if name.startswith("LDG"))
    last = max(i for i, name in enumerate(instructions) if name.startswith("STG"))
    assert last - first <= 320


def test_a_multiprocessor_holds_eight_blocks(build: Path) -> None:
    found = kernels(build, "rotate/rotate")
    assert len(found) == 12
    assert all(8 * 128 * one.registers <= REGISTERS for one in found)
