"""The all-reduce's machine code for sm_70: accesses of whole lines, and blocks that a multiprocessor holds."""

from pathlib import Path

import pytest

from perfmodel.sass_model import Instruction

from ..compiled import REGISTERS, kernel

KERNELS = ["all_reduce_kernel<__half>", "all_reduce_kernel<float>"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_lines_data_and_epoch_travel_in_one_access_of_the_whole_system(
    sass: dict[str, list[Instruction]], name: str
) -> None:
    (code,) = [code for full, code in sass.items() if name in full]
    names = [i.name for i in code]
    assert "STG.E.128.STRONG.SYS" in names
    assert names.count("LDG.E.128.STRONG.SYS") == 2  # two lines are in flight together
    assert not any(name.startswith("MEMBAR") for name in names)


@pytest.mark.parametrize("name", ["all_reduce_kernelI6__half", "all_reduce_kernelIf"])
def test_a_multiprocessor_holds_a_block(build: Path, name: str) -> None:
    assert 256 * kernel(build, "all_reduce/all_reduce", name).registers <= REGISTERS
