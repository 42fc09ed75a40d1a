from collections.abc import Iterator

import pytest
import torch
import voltserve_kernels

INSTRUCTION_SETS = voltserve_kernels.cpu_instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Has the CPU's ops compute with one instruction set after another, of those this machine has."""
    torch.ops.voltserve._use_cpu_instruction_set(request.param)
    yield request.param
    torch.ops.voltserve._use_cpu_instruction_set(INSTRUCTION_SETS[0])
