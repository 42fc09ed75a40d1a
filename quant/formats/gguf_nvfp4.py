"""NVFP4 in GGUF (github.com/ggml-org/ggml, `block_nvfp4`, tensor type 40), read.

A row of K elements is K/64 blocks of 36 bytes:

    4 bytes      UE4M3 scales, one per 16 elements
    4 x 8 bytes  codes of 16 elements each: byte j holds element j in its low nibble, element j + 8 in its high nibble

ggml decodes codes with a table of doubled values, and halves the scale. The product is e2m1 * e4m3, as everywhere else.
UE4M3 has no sign. 0x7F is NaN elsewhere; ggml reads it as 0. The global multiplier of `NAME.weight` is the float32
tensor `NAME.scale`, or 1 without one.
"""

import torch

from quant import e4m3
from quant.constants import DEFAULT_GROUP_SIZE
from quant.errors import QuantError
from quant.tensor import NVFP4Tensor

TENSOR_TYPE = 40
BLOCK, BLOCK_BYTES, GROUP_SIZE = 64, 36, DEFAULT_GROUP_SIZE
_SCALES = BLOCK // GROUP_SIZE
_REMEDY = "Download the GGUF file again, or convert the model to it again"


def read_matrix(data: torch.Tensor, columns: int, multiplier: float, name: str) -> NVFP4Tensor:
    """The matrix [N, columns] from its bytes, uint8 [N, columns / 64 * 36].

    Raises QuantError, naming the tensor, for a wrong shape, a scale with a sign, and a multiplier that is not positive.
    """
    if (
        data.dtype != torch.uint8
        or data.dim() != 2
        or columns % BLOCK
        or data.shape[1] != columns // BLOCK * BLOCK_BYTES
    ):
        expected = f"uint8 [N, {columns} / {BLOCK} * {BLOCK_BYTES}]"
        raise QuantError(f"{name}: expected {expected}, got {data.dtype} {list(data.shape)}", _REMEDY)
    if not 0 < multiplier < float("inf"):
        raise QuantError(f"{name}: expected a positive scale, got {multiplier}", _REMEDY)
    rows = data.shape[0]
    blocks = data.view(rows, columns // BLOCK, BLOCK_BYTES)
    scales = blocks[..., :_SCALES].reshape(rows, columns // GROUP_SIZE)
    if (scales & 0x80).any():
        index = (scales & 0x80).nonzero()[0].tolist()
        raise QuantError(
            f"{name}: expected scales without a sign, got 0x{int(scales[tuple(index)]):02X} at {index}", _REMEDY
        )
    scales = torch.where(scales == e4m3.NAN, 0, scales)
    halves = blocks[..., _SCALES:].reshape(rows, columns // GROUP_SIZE, GROUP_SIZE // 2)
    codes = torch.cat((halves & 0xF, halves >> 4), dim=-1).view(rows, columns)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    factor = torch.full((rows,), multiplier, dtype=torch.float32)
    return NVFP4Tensor(packed, scales.view(torch.float8_e4m3fn), factor, GROUP_SIZE)
