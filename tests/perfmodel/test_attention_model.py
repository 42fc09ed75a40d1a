"""The time of one iteration of an attention kernel's main loop."""

from perfmodel.attention_model import Kernel
from perfmodel.sass_model import GPUS, Instruction

PCIE = GPUS["v100-pcie"]


def test_an_iteration_is_bound_by_the_pipe_with_most_to_do() -> None:
    loop = [Instruction(16 * i, name, "") for i, name in enumerate(["LDS.128"] * 3 + ["FFMA"] * 5 + ["MUFU.EX2"] * 2)]
    kernel = Kernel("made up", tuple(loop), warps=4, rows=1, positions=1)
    _, seconds, pipe = kernel.iteration(PCIE)
    assert (pipe, seconds) == ("memory", 3 * 16 / PCIE.clock_hz)
