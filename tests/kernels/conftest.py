"""The CUDA kernels compiled for sm_70, which needs no GPU."""

import subprocess
from pathlib import Path

import pytest

from kernels.tools.native import LIBRARY, ROOT, Library
from perfmodel.sass_model import Instruction, disassemble


@pytest.fixture(scope="session")
def cuda_home() -> Path:
    """A toolkit that compiles for sm_70, fetched where there is none."""
    printed = subprocess.run([ROOT / "scripts" / "fetch_nvcc.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(printed.strip())


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder with the shared library, its objects and what ptxas said of each."""
    subprocess.run([ROOT / "scripts" / "build_cuda.sh"], check=True, stdout=subprocess.DEVNULL)
    return LIBRARY.parent


@pytest.fixture(scope="session")
def library(build: Path) -> Library:
    """The launchers; without a GPU only the plan answers."""
    return Library(build / LIBRARY.name)


@pytest.fixture(scope="session")
def sass(build: Path, cuda_home: Path) -> dict[str, list[Instruction]]:
    """sm_70 instructions by kernel."""
    return disassemble(build / LIBRARY.name, "sm_70", cuda_home)
