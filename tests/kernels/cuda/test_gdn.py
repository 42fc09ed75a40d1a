"""What the compiler made of Gated DeltaNet's kernels for sm_70."""

import re
from pathlib import Path

import pytest

from perfmodel.sass_model import Instruction

KERNELS = ("delta_decode_kernel<(int)128>", "delta_scan_kernel<(int)128>", "conv1d_kernel")
REGISTERS, SHARED_MEMORY = 65536, 96 * 1024  # of a V100's processor


def code_of(sass: dict[str, list[Instruction]], name: str) -> list[Instruction]:
    (found,) = [code for kernel, code in sass.items() if name in kernel]
    return found


def test_states_are_read_and_written_by_128_bits(sass: dict[str, list[Instruction]]) -> None:
    code = code_of(sass, "delta_decode_kernel<(int)128>")
    assert sum(i.name.startswith("LDG.E.128") for i in code) >= 8
    assert sum(i.name.startswith("STG.E.128") for i in code) == 8


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_computed_in_halves(sass: dict[str, list[Instruction]], kernel: str) -> None:
    """States and sums stay in fp32: halves are only converted. Nor is there anything that Hopper would emulate."""
    code = code_of(sass, kernel)
    assert [i.name for i in code if re.match(r"HFMA2|HMUL2|HADD2(?!\.F32)|HMMA", i.name)] == []
    assert any(i.name.startswith("FFMA") for i in code)


@pytest.mark.parametrize("kernel", ["delta_decode_kernelILi128E", "delta_scan_kernelILi128E", "conv1d_kernelE"])
def test_four_blocks_fit_a_v100s_processor(build: Path, kernel: str) -> None:
    report = (build / "gdn" / "gdn.o.ptxas").read_text()
    entry = rf"Compiling entry function '\w+{kernel}\w*' for 'sm_70'.*?Used (\d+)(.*?)\n"
    ((registers, rest),) = re.findall(entry, report, re.DOTALL)
    shared = re.search(r"(\d+) bytes smem", rest)
    assert 4 * 128 * int(registers) <= REGISTERS
    assert shared is None or 4 * int(shared[1]) <= SHARED_MEMORY
