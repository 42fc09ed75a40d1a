"""The packed layout's words and scales: the bits that kernels/cuda/common/layout.cuh promises its decoders."""

import itertools
import struct

import torch

from kernels.tools.native import Library
from kernels.tools.reference import E2M1, E4M3_NAN, E4M3_NUMBERS

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


def test_every_scale_but_nan_is_kept_without_its_sign(library: Library) -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for byte in E4M3_NUMBERS:
        placed = library.place_scale(byte)
        assert 0 <= placed <= 255
        # As decode_scales() takes it: bits 14..7 of an fp16 number, 2^6 times the scale.
        assert struct.unpack("<e", struct.pack("<H", placed << 7))[0] == 2.0**6 * abs(float(scales[byte]))


def test_a_code_times_its_scale_is_a_number_of_fp16(library: Library) -> None:
    products = [
        E2M1[code] * 2.0**-14 * struct.unpack("<e", struct.pack("<H", library.place_scale(byte) << 7))[0]
        for code, byte in itertools.product(range(8), range(E4M3_NAN))
    ]
    assert torch.tensor(products, dtype=torch.float64).half().double().tolist() == products
