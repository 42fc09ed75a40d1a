"""The plain norm and rotation without a GPU: the library's structs, and what the check on a GPU expects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vllm  # noqa: F401 - its plugin defines torch.ops._C

from kernels.tools import gpu_check_plain
from kernels.tools.native import LIBRARY
from kernels.tools.native_plain import PlainLibrary


def test_the_library_takes_the_structs_of_the_tools(build: Path) -> None:
    PlainLibrary(build / LIBRARY.name)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("rotated", [16, 6])
def test_the_check_expects_the_bits_of_the_operator_on_cpus(halves: bool, rotated: int) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 16, generator=random).half()
    cos_sin = torch.rand(40, rotated, generator=random).half()
    positions = torch.tensor([0, 39, 7, 7, 1])
    turned = x.flatten(1).clone()
    torch.ops._C.rotary_embedding(positions, turned, None, 16, cos_sin, halves)
    expected = gpu_check_plain.rotated_by_torch(x, cos_sin[positions], halves=halves)
    assert torch.equal(turned.unflatten(1, (3, 16)), expected)
