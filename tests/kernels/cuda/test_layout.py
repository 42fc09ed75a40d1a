"""The packed layout's words: the bits that kernels/cuda/layout.cuh promises its decoders."""

import itertools
import struct

from kernels.tools.native import Library
from kernels.tools.reference import E2M1

# As decode_word() takes them: pair p of a word, shifted left by (sign, magnitude) and masked.
SHIFTS = ((0, 0), (3, 3), (1, 6), (2, 9))
SIGN, MAGNITUDE = 0x80008000, 0x0E000E00


def decoded(word: int) -> list[float]:
    values = []
    for sign, magnitude in SHIFTS:
        bits = (word << sign & SIGN) | (word << magnitude & MAGNITUDE)
        values += [value * 2.0**14 for value in struct.unpack("<2e", struct.pack("<I", bits))]
    return values


def test_every_code_decodes_in_every_place_and_disturbs_no_other(library: Library) -> None:
    for column, code in itertools.product(range(8), range(16)):
        values = decoded(library.place_code(code, column))
        assert values[column] == E2M1[code]
        assert [v for i, v in enumerate(values) if i != column] == [0.0] * 7


def test_eight_codes_share_a_word_without_overlap(library: Library) -> None:
    for first in range(16):
        codes = [(first + 5 * column) % 16 for column in range(8)]
        word = 0
        for column, code in enumerate(codes):
            bits = library.place_code(code, column)
            assert word & bits == 0
            word |= bits
        assert decoded(word) == [E2M1[code] for code in codes]
