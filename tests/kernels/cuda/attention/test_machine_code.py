"""Attention's machine code for sm_70: tensor core products, wide loads, and blocks that a multiprocessor holds."""

from pathlib import Path

import pytest

from engine.limits import HEAD_SIZES
from kernels.tools.native_attention import AttentionLibrary
from perfmodel.attention_model import Model

from ..compiled import REGISTERS, SHARED_BYTES, kernel


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_prompts_are_multiplied_on_tensor_cores(model: Model, head_dim: int) -> None:
    kernel = model.prefill(head_dim)
    hmma = [i.name for i in kernel.loop if i.name.startswith("HMMA")]
    assert all(name.startswith("HMMA.884.F32.F32") for name in hmma)
    # A warp's 16 rows by its positions by the head, for K and, in whole groups of 64, V; 4 HMMA are 4 times 8x8x4.
    assert len(hmma) == 16 * kernel.positions * (head_dim + -(-head_dim // 64) * 64) * 4 // (4 * 8 * 8 * 4)
    assert kernel.count("FFMA") < len(hmma) / 8


@pytest.mark.parametrize("new", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_decoding_is_multiplied_on_tensor_cores_from_128_bit_loads(model: Model, head_dim: int, new: int) -> None:
    kernel = model.decode((8, 1, head_dim), 4, new)
    hmma = [i.name for i in kernel.loop if i.name.startswith("HMMA")]
    loads = [i for i in kernel.loop if i.name.startswith("LDG") and ".128" in i.name]
    keys, values = -(-head_dim // 32), -(-head_dim // 64)  # chunks per lane and position
    assert all(name.startswith("HMMA.884.F32.F32") for name in hmma)
    # A warp's 8 rows by its 16 positions by the head, for K and V; 4 HMMA are 4 times 8x8x4.
    assert len(hmma) == 8 * 16 * (32 * keys + 64 * values) * 4 // (4 * 8 * 8 * 4)
    assert kernel.count("FFMA") < 16
    # The other load of the loop is of 32 entries of the block table, for 16 iterations; only q may be in shared memory.
    assert len(loads) == 2 * keys + 4 * values
    assert kernel.count("LDG") - len(loads) == 1
    assert kernel.count("LDS") == (keys if head_dim > 128 else 0)
    assert kernel.count("STS") == 0


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_a_multiprocessor_holds_the_planned_prefill_blocks(
    build: Path, attention: AttentionLibrary, head_dim: int
) -> None:
    plan = attention.plan(1, 64, 0, 64, 1, 1, head_dim)
    compiled = kernel(build, "attention/prefill", f"kernelILi{head_dim}E")
    assert compiled.shared_bytes == 0
    assert plan.prefill_shared_bytes * plan.prefill_blocks_per_processor <= SHARED_BYTES
    assert compiled.registers * 2 * plan.prefill_rows * plan.prefill_blocks_per_processor <= REGISTERS


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_a_multiprocessor_holds_the_planned_decoding_blocks(
    build: Path, attention: AttentionLibrary, head_dim: int, rows: int
) -> None:
    shape = attention.plan(4, 4, 1, 1, rows, 1, head_dim).decode
    assert shape is not None
    compiled = kernel(build, "attention/decode", f"kernelILi{head_dim}ELi{shape.row_warps}E")
    threads = 32 * shape.row_warps * shape.token_warps
    assert compiled.registers * threads * shape.blocks_per_processor <= REGISTERS
    assert compiled.shared_bytes * shape.blocks_per_processor <= SHARED_BYTES
