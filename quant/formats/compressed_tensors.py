"""compressed-tensors' `nvfp4-pack-quantized` (github.com/vllm-project/compressed-tensors).

Per linear [N, K]: `weight_packed` uint8 [N, K/2] with the even column in the low nibble, `weight_scale` float8_e4m3fn
[N, K/g], `weight_global_scale` float32 [1], a **divisor**: w = e2m1 * scale / global. Models that also quantize
activations (W4A4) add `input_global_scale`, which reading weights does not need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.errors import QuantError
from quant.jsonfile import field
from quant.tensor import GROUP_SIZES, NVFP4Tensor

QUANT_METHOD = "compressed-tensors"
FORMAT = "nvfp4-pack-quantized"
PACKED, SCALE, GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"

_REMEDY = "Check that the model is compressed-tensors NVFP4 and download it again"


def layout(rows: int, columns: int, group_size: int) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """(suffix, dtype, shape) of the tensors that stand for a linear [rows, columns]."""
    return (
        (PACKED, torch.uint8, (rows, columns // 2)),
        (SCALE, torch.float8_e4m3fn, (rows, columns // group_size)),
        (GLOBAL, torch.float32, (1,)),
    )


def read_linear(tensors: Mapping[str, torch.Tensor], name: str, group_size: int) -> NVFP4Tensor:
    """The linear `name` from its tensors, keyed by the suffixes above (others are left alone).

    An all-zero weight may carry any global, even NaN. Raises QuantError naming the tensor, expected and got.
    """
    for suffix in (PACKED, SCALE, GLOBAL):
        if suffix not in tensors:
            raise QuantError(f"{name}.{suffix} is missing", _REMEDY)
    packed, scale, divisor = (tensors[suffix] for suffix in (PACKED, SCALE, GLOBAL))
    if divisor.dtype != torch.float32 or divisor.numel() != 1:
        got = f"{divisor.dtype} {list(divisor.shape)}"
        raise QuantError(f"{name}.{GLOBAL}: expected torch.float32 [1], got {got}", _REMEDY)
    factor = 1 / divisor.reshape(1)
    if not (torch.isfinite(factor) & (factor > 0)):
        if (packed & 0x77).any() and (scale.view(torch.uint8) & 0x7F).any():
            raise QuantError(f"{name}.{GLOBAL}: expected a positive divisor, got {float(divisor)}", _REMEDY)
        factor = torch.ones_like(factor)
    try:
        tensor = NVFP4Tensor(packed, scale, factor.expand(packed.shape[0]).clone(), group_size)
    except ValueError as error:
        raise QuantError(f"{name}: {error} (codes are {PACKED}, block_scales are {SCALE})", _REMEDY) from None
    nan = scale.view(torch.uint8) & 0x7F == 0x7F
    if nan.any():
        raise QuantError(f"{name}.{SCALE}{nan.nonzero()[0].tolist()}: expected a number, got NaN", _REMEDY)
    return tensor


def write_linear(tensor: NVFP4Tensor, name: str) -> dict[str, torch.Tensor]:
    """The tensors of the linear `name`, keyed by suffix; `read_linear` gives back the very same values.

    Raises ValueError when the rows carry different factors, or a factor that no float32 divisor stands for: this format
    cannot hold either without rounding.
    """
    factor = tensor.row_factor[:1]
    if not torch.equal(tensor.row_factor, factor.expand_as(tensor.row_factor)):
        raise ValueError(f"{name}: expected one factor for all rows, got several; write the fused layer's parts apart")
    # float32 division rounds, so the divisor may be the reciprocal's neighbour.
    nearest = 1 / factor
    for divisor in (nearest, nearest.nextafter(torch.zeros_like(nearest)), nearest.nextafter(2 * nearest)):
        if torch.equal(1 / divisor, factor):
            return {PACKED: tensor.codes, SCALE: tensor.block_scales, GLOBAL: divisor}
    raise ValueError(f"{name}: factor {float(factor)} is not the reciprocal of any float32")


@dataclass(frozen=True)
class Config:
    """What a `quantization_config` says. `ignore`: module names, or patterns after "re:", left in 16 bits.

    `w4a4`: the model was made for 4-bit activations too; its weights are read the same.
    """

    group_size: int
    ignore: tuple[str, ...]
    w4a4: bool = False


def write_config(group_size: int, ignore: tuple[str, ...]) -> dict[str, object]:
    """The `quantization_config` of a weight-only model. Group 32 is the same format with another `group_size`."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": group_size,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def read_config(data: Mapping[str, object], source: str) -> Config:
    """Reads a `quantization_config`; `source` names it in errors.

    Accepts weight strategies `tensor_group` and `group` and files without `scale_dtype`, as published. Raises
    QuantError for anything that is not NVFP4 or not the same in every group.
    """
    for key, expected in (("quant_method", QUANT_METHOD), ("format", FORMAT)):
        if (got := field(data, key, str, source, _REMEDY)) != expected:
            raise QuantError(f"{source}: {key}: expected {expected!r}, got {got!r}", _REMEDY)
    ignore = field(data, "ignore", list, source, _REMEDY)
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise QuantError(f"{source}: ignore: expected names, got {ignore!r}", _REMEDY)
    groups = field(data, "config_groups", dict, source, _REMEDY)
    schemes = {_read_group(groups, key, f"{source}: config_groups") for key in groups}
    if len(schemes) != 1:
        raise QuantError(f"{source}: config_groups: expected one scheme for all, got {len(schemes)}", _REMEDY)
    group_size, w4a4 = schemes.pop()
    return Config(group_size, tuple(ignore), w4a4)


def _read_group(groups: Mapping[str, object], key: str, source: str) -> tuple[int, bool]:
    group = field(groups, key, dict, source, _REMEDY)
    source = f"{source}.{key}"
    if (targets := field(group, "targets", list, source, _REMEDY)) != ["Linear"]:
        raise QuantError(f"{source}.targets: expected ['Linear'], got {targets!r}", _REMEDY)
    weights = field(group, "weights", dict, source, _REMEDY)
    accepted: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("num_bits", (4,)),
        ("type", ("float",)),
        ("strategy", ("tensor_group", "group")),
        ("symmetric", (True,)),
        ("dynamic", (False,)),
        ("group_size", GROUP_SIZES),
        ("scale_dtype", (None, "torch.float8_e4m3fn")),
    )
    for name, values in accepted:
        if (got := weights.get(name)) not in values:
            expected = " or ".join(repr(value) for value in values)
            raise QuantError(f"{source}.weights.{name}: expected {expected}, got {got!r}", _REMEDY)
    return field(weights, "group_size", int, source, _REMEDY), group.get("input_activations") is not None
