"""E2M1, NVFP4's 4-bit float (OCP Microscaling Formats v1.0, FP4): sign, 2 exponent bits (bias 1), 1 mantissa bit.

A code is sign << 3 | index into `MAGNITUDES`. Code 8 is -0. There is neither NaN nor Inf.
"""

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = MAGNITUDES[-1]
VALUES = MAGNITUDES + tuple(-m for m in MAGNITUDES)

_FLOAT32_EXPONENT = 0x7F800000


def round_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """The E2M1 magnitude nearest to each x >= 0, ties to the even code, anything above 6 (Inf too) to 6.

    x: float32, any shape; the result likewise. The grid's step is half the power of two at or below x, and 0.5 below 2.
    Rounding to an even multiple of the step rounds to an even mantissa. All products are exact. The power of two is x
    with its mantissa bits cleared, because this is the inner loop of every scale search.
    """
    x = x.clamp(max=MAX)
    step = (x.clamp(min=1).view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32).mul_(0.5)
    return x.div_(step).round_().mul_(step)


def encode(x: torch.Tensor) -> torch.Tensor:
    """The code (uint8, 0..15) of each element: nearest, ties to even, saturating at +-6 (Inf too), the sign kept on 0.

    x: any shape, float16, bfloat16 or float32. Raises TypeError for float64, which would be rounded twice, and
    ValueError on NaN, which has no code.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.isnan().any():
        raise ValueError(f"x: expected numbers, got NaN at index {x.isnan().nonzero()[0].tolist()}")
    steps = torch.tensor(MAGNITUDES[1:], device=x.device)
    index = torch.bucketize(round_magnitudes(x.float().abs()), steps, right=True, out_int32=True)
    return index.to(torch.uint8) | torch.signbit(x).to(torch.uint8) << 3


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value of each code (uint8, 0..15; any shape), exact in every floating dtype of 16 bits or more."""
    table = torch.tensor(VALUES, dtype=dtype, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] to bytes uint8 [N, K/2]: the even column in the low nibble, the odd one in the high nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [N, K/2] to codes uint8 [N, K]: the inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
