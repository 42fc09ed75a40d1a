"""Attention's plan, and the model of its speed on a V100."""

from pathlib import Path

import pytest

from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from perfmodel.attention_model import Model
from perfmodel.sass_model import GPUS, Instruction


@pytest.fixture(scope="session")
def attention(build: Path) -> AttentionLibrary:
    """The launchers; without a GPU only the plan answers."""
    return AttentionLibrary(build / LIBRARY.name)


@pytest.fixture(scope="session")
def model(attention: AttentionLibrary, sass: dict[str, list[Instruction]]) -> Model:
    """Our kernels on a V100."""
    return Model(attention, sass, GPUS["v100-pcie"])
