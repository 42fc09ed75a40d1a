"""E4M3FN, the 8-bit float of NVFP4's block scales (OCP 8-bit Floating Point v1.0): bias 7, no Inf, NaN 0x7F and 0xFF.

Codes 0 to `MAX_CODE` are the non-negative values in rising order, so a step of one code is the next scale.
"""

import torch

MAX = 448.0
MAX_CODE = 0x7E
NAN = 0x7F  # without its sign
SMALLEST = 2.0**-9


def encode(x: torch.Tensor) -> torch.Tensor:
    """The nearest float8_e4m3fn of each element, ties to even, saturating at +-448 (Inf too); NaN stays NaN.

    x: any shape, float16, bfloat16 or float32. Raises TypeError for float64, which torch would round twice.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    return x.float().clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value of each code (uint8 or float8_e4m3fn, any shape), exact in every floating dtype of 16 bits or more."""
    return codes.view(torch.float8_e4m3fn).to(dtype)
