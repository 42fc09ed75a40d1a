"""What holds for every kernel of the library: no spills for sm_70, and PTX for newer GPUs."""

import re
import subprocess
from pathlib import Path

import pytest

from kernels.tools.native import LIBRARY
from perfmodel.sass_model import Instruction

from ..compiled import kernels

# The widest rows of ranks spill a little. norm/test_machine_code.py says how much they may.
SPILLING = re.compile(r"norm_kernel(ILi3ELb1E|<\(int\)3, \(bool\)1>)")


def test_no_kernel_spills_registers(build: Path) -> None:
    found = kernels(build)
    assert len(found) >= 30
    spilling = [one.name for one in found if one.spill_stores or one.spill_loads]
    assert [name for name in spilling if not SPILLING.search(name)] == []


def test_no_kernel_touches_local_memory(sass: dict[str, list[Instruction]]) -> None:
    touching = [
        name
        for name, code in sass.items()
        if any(i.name.startswith(("LDL", "STL")) for i in code) and not SPILLING.search(name)
    ]
    assert touching == []


def ptx(build: Path, cuda_home: Path, oldest: str) -> str:
    """The library's PTX for GPUs from `oldest` on."""
    command: list[str | Path] = [cuda_home / "bin" / "cuobjdump", "--dump-ptx", "-arch", oldest, build / LIBRARY.name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("oldest", "instruction"),
    [
        ("sm_70", "mma.sync.aligned.m8n8k4"),
        ("sm_80", "mma.sync.aligned.m16n8k16"),
        ("sm_90", "griddepcontrol.wait"),
    ],
)
def test_ptx_for_newer_gpus_is_in_the_library(build: Path, cuda_home: Path, oldest: str, instruction: str) -> None:
    assert instruction in ptx(build, cuda_home, oldest)


def test_a_v100s_code_has_nothing_of_newer_gpus(build: Path, cuda_home: Path) -> None:
    code = ptx(build, cuda_home, "sm_70")
    assert [name for name in ("griddepcontrol", "m16n8k16") if name in code] == []
