"""The GEMM's machine code for sm_70: wide loads, tensor cores, few instructions, and the planned occupancy."""

from pathlib import Path

import pytest

from kernels.tools.native import Library
from perfmodel.sass_model import GPUS, Instruction, find_kernel, split
from perfmodel.sass_schedule import cycles

from ..compiled import REGISTERS, kernels

VARIANTS = ("mma2", "mma4", "mma8", "mma16", "mma32", "mma64", "mma128")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_multiprocessors_registers_hold_the_planned_blocks(library: Library, build: Path, variant: str) -> None:
    shape = library.shape(library.variants()[variant])
    assert shape is not None
    tokens = int(variant[3:])
    product = f"MmaILi{min(64, tokens)}ELi{1 if tokens == 64 else 2}E"
    used = [one.registers for one in kernels(build, "linear/*") if product in one.name]
    assert len(used) >= 2
    assert max(used) * shape.threads * shape.blocks_per_processor <= REGISTERS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [16, 32])
def test_weights_are_read_by_128_bit_loads(sass: dict[str, list[Instruction]], variant: str, group: int) -> None:
    kernel = split(variant, find_kernel(sass, variant, group))
    loads = [i.name for i in kernel.loop if i.name.startswith("LDG") and ".NA" in i.name]
    assert loads
    assert all(".128" in name for name in loads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_are_summed_in_fp32_by_voltas_tensor_cores(sass: dict[str, list[Instruction]], variant: str) -> None:
    names = {i.name for i in split(variant, find_kernel(sass, variant, 16)).loop}
    assert any(name.startswith("HMMA.884.F32.F32") for name in names)
    assert not any(name.startswith(("HFMA2", "FFMA")) for name in names)


@pytest.mark.parametrize("variant", ["mma2", "mma4", "mma8"])
def test_decoding_a_stage_takes_few_instructions(sass: dict[str, list[Instruction]], variant: str) -> None:
    # A warp decodes 4096 weights in 240 and multiplies in 128. The rest is loads, addresses and the loop.
    assert len(split(variant, find_kernel(sass, variant, 16)).loop) <= 415


@pytest.mark.parametrize(
    ("variant", "hmma_latency", "least"),
    [("mma16", 24, 70e12), ("mma32", 24, 70e12), ("mma64", 24, 70e12), ("mma128", 12, 95e12), ("mma128", 24, 85e12)],
)
def test_products_of_many_tokens_seldom_wait_for_each_other(
    library: Library, sass: dict[str, list[Instruction]], variant: str, hmma_latency: int, least: float
) -> None:
    shape, gpu = library.shape(library.variants()[variant]), GPUS["v100-pcie"]
    assert shape is not None
    loop = split(variant, find_kernel(sass, variant, 16)).loop
    taken = cycles(loop, shape.blocks_per_processor * shape.threads // 128, gpu, hmma_latency)
    flops = 2 * shape.tokens * shape.rows * 64 * shape.stage_tiles / (shape.threads // 32)  # per warp and stage
    assert flops / taken * 4 * gpu.processors * gpu.clock_hz >= least
