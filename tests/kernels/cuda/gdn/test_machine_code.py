"""Gated DeltaNet's machine code for sm_70: wide accesses, fp32 arithmetic, and four blocks per multiprocessor."""

import re
from pathlib import Path

import pytest

from perfmodel.sass_model import Instruction

from ..compiled import REGISTERS, SHARED_BYTES, kernel

KERNELS = ("delta_decode_kernel<(int)128>", "delta_scan_kernel<(int)128>", "conv1d_kernel")


def code_of(sass: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    (found,) = [code for full_name, code in sass.items() if name in full_name]
    return found


def test_states_are_read_and_written_by_128_bits(sass: dict[str, list[Instruction]]) -> None:
    code = code_of(sass, "delta_decode_kernel<(int)128>")
    assert sum(i.name.startswith("LDG.E.128") for i in code) >= 8
    assert sum(i.name.startswith("STG.E.128") for i in code) == 8


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_computed_in_halves(sass: dict[str, list[Instruction]], name: str) -> None:
    """States and sums stay in fp32; halves are only converted. Hopper emulates none of the instructions."""
    code = code_of(sass, name)
    assert [i.name for i in code if re.match(r"HFMA2|HMUL2|HADD2(?!\.F32)|HMMA", i.name)] == []
    assert any(i.name.startswith("FFMA") for i in code)


@pytest.mark.parametrize("name", ["delta_decode_kernelILi128E", "delta_scan_kernelILi128E", "conv1d_kernelE"])
def test_a_multiprocessor_holds_four_blocks(build: Path, name: str) -> None:
    compiled = kernel(build, "gdn/gdn", name)
    assert 4 * 128 * compiled.registers <= REGISTERS
    assert 4 * compiled.shared_bytes <= SHARED_BYTES
