"""What the compiler made of the attention kernels for sm_70, and the speed that follows from it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.limits import HEAD_SIZES
from kernels.tools.native import LIBRARY
from kernels.tools.native_attention import AttentionLibrary
from perfmodel.attention_model import Kernel, Model, prompt, triton_prefill
from perfmodel.sass_model import GPUS, Instruction

REGISTERS, SHARED = 65536, 96 * 1024  # of a V100's multiprocessor
PCIE = GPUS["v100-pcie"]


@pytest.fixture(scope="session")
def model(build: Path, sass: dict[str, list[Instruction]]) -> Model:
    """Our kernels and a V100."""
    return Model(AttentionLibrary(build / LIBRARY.name), sass, PCIE)


def reports(build: Path, kernel: str) -> dict[str, tuple[int, int]]:
    """(registers, bytes of static shared memory) of each instantiation, by its mangled template arguments."""
    text = (build / "attention" / f"{kernel}.o.ptxas").read_text()
    found = re.findall(
        r"entry function '\w+?kernelI(\w+?)EEEv\w+' for 'sm_70'.*?Used (\d+) registers(.*?)\n", text, re.DOTALL
    )
    return {
        arguments: (int(registers), int((re.search(r"(\d+) bytes smem", rest) or ["", "0"])[1]))
        for arguments, registers, rest in found
    }


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
    keys, values = -(-head_dim // 32), -(-head_dim // 64)  # chunks of a lane and position
    assert all(name.startswith("HMMA.884.F32.F32") for name in hmma)
    # A warp's 8 rows by its 16 positions by the head, for K and V; 4 HMMA are 4 times 8x8x4.
    assert len(hmma) == 8 * 16 * (32 * keys + 64 * values) * 4 // (4 * 8 * 8 * 4)
    assert kernel.count("FFMA") < 16
    # The other load of the loop is of 32 entries of the block table, for 16 turns; only q may lie in shared memory.
    assert len(loads) == 2 * keys + 4 * values
    assert kernel.count("LDG") - len(loads) == 1
    assert kernel.count("LDS") == (keys if head_dim > 128 else 0)
    assert kernel.count("STS") == 0


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_the_planned_prefill_blocks_fit_a_v100(build: Path, head_dim: int) -> None:
    plan = AttentionLibrary(build / LIBRARY.name).plan(1, 64, 0, 64, 1, 1, head_dim)
    registers, static = reports(build, "prefill")[f"Li{head_dim}"]
    assert static == 0
    assert plan.prefill_shared_bytes * plan.prefill_blocks_per_processor <= SHARED
    assert registers * 2 * plan.prefill_rows * plan.prefill_blocks_per_processor <= REGISTERS


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_the_planned_decoding_blocks_fit_a_v100(build: Path, head_dim: int, rows: int) -> None:
    shape = AttentionLibrary(build / LIBRARY.name).plan(4, 4, 1, 1, rows, 1, head_dim).decode
    assert shape is not None
    arguments = f"Li{head_dim}ELi{shape.row_warps}"
    registers, static = reports(build, "decode")[arguments]
    threads = 32 * shape.row_warps * shape.token_warps
    assert registers * threads * shape.blocks_per_processor <= REGISTERS
    assert static * shape.blocks_per_processor <= SHARED


@pytest.mark.parametrize(("head_dim", "least"), [(128, 50), (256, 50)])
def test_a_v100_should_reach_50_tflops_on_a_long_prompt(model: Model, head_dim: int, least: float) -> None:
    row = prompt(PCIE, model.prefill(head_dim), (32, 4, head_dim), 2048, 6144)
    assert row["tflop_s"] >= least


@pytest.mark.skipif(find_spec("triton") is None, reason="torch's CPU build comes without triton")
@pytest.mark.parametrize("head_dim", [128, 256])
def test_prompts_should_take_a_fifth_of_tritons_time_on_a_v100(
    model: Model, cuda_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head_dim: int
) -> None:
    """Triton has no tensor cores on sm_70; its machine code is judged by the same model."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    package = find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    theirs = triton_prefill(Path(package.submodule_search_locations[0]), head_dim, 8, cuda_home)
    assert theirs.count("HMMA") == 0
    times = [prompt(PCIE, kernel, (32, 4, head_dim), 2048, 6144)["us"] for kernel in (model.prefill(head_dim), theirs)]
    assert 5 * times[0] <= times[1]


def test_a_turn_is_bound_by_the_pipe_with_most_to_do() -> None:
    loop = [Instruction(16 * i, name, "") for i, name in enumerate(["LDS.128"] * 3 + ["FFMA"] * 5 + ["MUFU.EX2"] * 2)]
    kernel = Kernel("made up", tuple(loop), warps=4, rows=1, positions=1)
    _, seconds, pipe = kernel.turn(PCIE)
    assert (pipe, seconds) == ("memory", 3 * 16 / PCIE.clock_hz)
