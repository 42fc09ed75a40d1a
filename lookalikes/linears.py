"""Random NVFP4 and FP8 tensors of one linear as checkpoints store them, beside their values in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant import e4m3
from quant.formats.compressed_tensors import GLOBAL, PACKED, SCALE
from quant.formats.weights import FP8_BLOCK

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass
class Member:
    """One linear of a checkpoint: `tensors` by suffix, and `weight` float64 [N, K], which they stand for."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


def member(rows: int, columns: int, divisor: float, group_size: int = 16, seed: int = 0) -> Member:
    """A random linear [rows, columns] in compressed-tensors' layout. `divisor`: its global scale."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    # Every E4M3 code but NaN and negative ones.
    scale = torch.randint(0, e4m3.NAN, (rows, columns // group_size), generator=generator, dtype=torch.uint8)
    scale = scale.view(torch.float8_e4m3fn)
    exact = E2M1[codes.long()] * scale.double().repeat_interleave(group_size, dim=1)
    # float32 holds the reciprocal of the divisor: the one rounding that the internal tensor is allowed.
    factor = (1 / torch.tensor([divisor], dtype=torch.float32)).double()
    tensors = {PACKED: codes[:, ::2] | codes[:, 1::2] << 4, SCALE: scale, GLOBAL: torch.tensor([divisor])}
    return Member(tensors, exact * factor)


def in_modelopt(part: Member, multiplier: float) -> Member:
    """The codes and scales of `part` under ModelOpt's names, times another factor."""
    names = {PACKED: "weight", SCALE: "weight_scale"}
    tensors = {names[name]: tensor for name, tensor in part.tensors.items() if name in names}
    tensors |= {"weight_scale_2": torch.tensor(multiplier), "input_scale": torch.tensor(3.0)}
    return Member(tensors, part.weight * torch.tensor(multiplier).double())


def fp8_member(rows: int, columns: int, scales: str = "tensor", name: str = "weight_scale", seed: int = 0) -> Member:
    """A random FP8 linear [rows, columns] with a scale per tensor, per row ("channel") or per 128x128 block.

    `name`: the scale's. Every E4M3 code but NaN occurs.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, e4m3.NAN, (rows, columns), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    shapes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))}
    stored = 2e-4 + 4e-4 * torch.rand(shapes[scales], generator=generator)
    spread = stored.double()
    if scales == "block":
        spread = spread.repeat_interleave(FP8_BLOCK, dim=0).repeat_interleave(FP8_BLOCK, dim=1)[:rows, :columns]
    weight = codes.view(torch.float8_e4m3fn)
    return Member({"weight": weight, name: stored, "input_scale": torch.tensor(3.0)}, weight.double() * spread)
