"""What the compiler made of the kernels for sm_70: the properties that their speed rests on."""

import re
import subprocess
from pathlib import Path

import pytest

from kernels.tools.native import Library
from perfmodel.sass_model import GPUS, Instruction, find_kernel, split
from perfmodel.sass_schedule import cycles

REGISTERS_OF_A_V100 = 65536
# The widest rows of ranks spill some, and test_norm.py says how much they may.
SPILLING = re.compile(r"norm_kernel(ILi3ELb1E|<\(int\)3, \(bool\)1>)")
VARIANTS = ("mma2", "mma4", "mma8", "mma16", "mma32", "mma64", "mma128")


def compiler_reports(build: Path) -> list[tuple[str, str]]:
    text = "".join(path.read_text() for path in sorted(build.glob("*/*.ptxas")))
    return re.findall(r"Compiling entry function '(\w+)' for 'sm_70'(.*?Used.*?)\n", text, flags=re.DOTALL)


def test_no_kernel_spills_registers(build: Path) -> None:
    reports = compiler_reports(build)
    kept = "0 bytes spill stores, 0 bytes spill loads"
    spilled = [name for name, report in reports if kept not in report and not SPILLING.search(name)]
    assert len(reports) >= 30
    assert spilled == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_planned_blocks_fit_a_v100s_registers(library: Library, build: Path, variant: str) -> None:
    shape = library.shape(library.variants()[variant])
    assert shape is not None
    tokens = int(variant[3:])
    product = f"MmaILi{min(64, tokens)}ELi{1 if tokens == 64 else 2}E"
    reports = [report for name, report in compiler_reports(build) if product in name]
    used = [int(found[1]) for report in reports if (found := re.search(r"Used (\d+) registers", report))]
    assert len(used) >= 2
    assert max(used) * shape.threads * shape.blocks_per_processor <= REGISTERS_OF_A_V100


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
    # 240 to decode 4096 weights a warp, 128 steps of products; the rest is loads, addresses and the loop.
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
    flops = 2 * shape.tokens * shape.rows * 64 * shape.stage_tiles / (shape.threads // 32)  # of a warp's stage
    assert flops / taken * 4 * gpu.processors * gpu.clock_hz >= least


def test_no_kernel_touches_local_memory(sass: dict[str, list[Instruction]]) -> None:
    touching = [
        name
        for name, code in sass.items()
        if any(i.name.startswith(("LDL", "STL")) for i in code) and not SPILLING.search(name)
    ]
    assert touching == []


@pytest.mark.parametrize(
    ("oldest", "instruction"),
    [
        ("sm_70", "mma.sync.aligned.m8n8k4"),
        ("sm_80", "mma.sync.aligned.m16n8k16"),
        ("sm_90", "griddepcontrol.wait"),
    ],
)
def test_ptx_for_newer_gpus_is_in_the_library(build: Path, cuda_home: Path, oldest: str, instruction: str) -> None:
    command = [cuda_home / "bin" / "cuobjdump", "--dump-ptx", "-arch", oldest, build / "libvoltserve_cuda.so"]
    assert instruction in subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("instruction", ["griddepcontrol", "m16n8k16"])
def test_a_v100s_code_has_nothing_of_newer_gpus(build: Path, cuda_home: Path, instruction: str) -> None:
    command = [cuda_home / "bin" / "cuobjdump", "--dump-ptx", "-arch", "sm_70", build / "libvoltserve_cuda.so"]
    assert instruction not in subprocess.run(command, check=True, capture_output=True, text=True).stdout
