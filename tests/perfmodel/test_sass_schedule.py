"""The model of a scheduler, on small loops whose cycles can be counted by hand."""

import pytest

from perfmodel.sass_model import GPUS, Instruction, parse
from perfmodel.sass_schedule import cycles

V100 = GPUS["v100-pcie"]
NONE = 7  # no counter


def instruction(name: str, stall: int = 1, result: int = NONE, operands: int = NONE, waits: int = 0) -> Instruction:
    return Instruction(0, name, "", stall | result << 5 | operands << 8 | waits << 11)


def test_independent_instructions_take_what_their_pipe_takes() -> None:
    assert cycles([instruction("HMMA.884.F32.F32.STEP0")] * 8, 1, V100, 12) == pytest.approx(16)
    assert cycles([instruction("BMOV.32.CLEAR")] * 8, 1, V100, 12) == pytest.approx(8)


def test_two_pipes_work_side_by_side() -> None:
    loop = [instruction("IMAD.SHL.U32"), instruction("LOP3.LUT")] * 4
    assert cycles(loop, 1, V100, 12) == pytest.approx(8)


def test_a_warp_waits_as_long_as_its_instruction_says() -> None:
    assert cycles([instruction("IADD3", stall=5)] * 4, 1, V100, 12) == pytest.approx(20)


@pytest.mark.parametrize("latency", [12, 24])
def test_a_product_on_the_same_sums_waits_for_the_one_before(latency: int) -> None:
    loop = [instruction("HMMA", result=0, waits=0b1), instruction("HMMA", result=0, waits=0b1)]
    assert cycles(loop, 1, V100, latency) == pytest.approx(2 * latency)


def test_another_warp_fills_the_wait() -> None:
    loop = [instruction("HMMA", result=0, waits=0b1)]
    assert cycles(loop, 4, V100, 12) == pytest.approx(12 / 4)


def test_shared_memory_is_one_unit_for_four_schedulers() -> None:
    assert cycles([instruction("LDS.U.128")] * 4, 2, V100, 12) == pytest.approx(4 * V100.cycles["lsu"])


def test_the_control_bits_are_read_from_the_encoding() -> None:
    sass = """
		Function : kernel(float)
        /*1620*/                   HMMA.884.F32.F32.STEP0 R56, R192.reuse.ROW, R2.reuse.COL, R56 ;      /* 0x00000002c0387236 */
                                                                                                        /* 0x0c2fe20000005438 */
        /*1630*/                   LDS.U.128 R188, [R237+0x1a80] ;                                      /* 0x001a8000edbc7984 */
                                                                                                        /* 0x000e620000001c00 */
"""  # noqa: E501
    product, load = parse(sass)["kernel(float)"]
    assert (product.control & 15, product.control >> 5 & 7, product.control >> 11 & 63) == (1, NONE, 0b10)
    assert (load.control & 15, load.control >> 5 & 7, load.control >> 11 & 63) == (1, 1, 0)
