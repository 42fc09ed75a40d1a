"""The packed layout of FP8 weights, without a GPU: every code's bits in a word, and the fp16 numbers they become."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.tools.native import Library
from kernels.tools.reference import E4M3_NUMBERS


def halves(bits: int) -> list[float]:
    return [float(half) for half in np.array([bits & 0xFFFF, bits >> 16], dtype=np.uint16).view(np.float16)]


def value(code: int) -> float:
    return float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("column", range(4))
def test_every_code_becomes_its_value_times_2_to_the_minus_8_exactly(library: Library, column: int) -> None:
    for code in E4M3_NUMBERS:
        decoded = halves(library.fp8_pair(library.place_fp8(code, column), column // 2))
        assert decoded[column % 2] * 2**8 == value(code), code
        assert decoded[1 - column % 2] == 0


def test_codes_of_a_word_do_not_disturb_each_other(library: Library) -> None:
    numbers = np.random.default_rng(5).choice(E4M3_NUMBERS, (2000, 4))
    for codes in numbers.tolist():
        word = sum(library.place_fp8(code, column) for column, code in enumerate(codes))
        found = [*halves(library.fp8_pair(word, 0)), *halves(library.fp8_pair(word, 1))]
        assert [one * 2**8 for one in found] == [value(code) for code in codes]
