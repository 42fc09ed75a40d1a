"""FP8 linears as checkpoints store them, in every format, and the config of `quant_method: fp8`. Torch-free.

Per linear [N, K]: `weight` float8_e4m3fn [N, K] and one scale, a **multiplier** in every format: w = e4m3 * scale.

    `weight_scale`       ModelOpt FP8: float32, one per tensor. compressed-tensors `float-quantized`: float32 or
                         bfloat16, one per tensor, per row ([N, 1]) or per block of 128x128
    `weight_scale_inv`   `quant_method: fp8` with `weight_block_size`: one per block. Not inverted, despite its name.

Models that quantize activations too add `input_scale`, which is dropped: activations stay in 16 bits or more.
"""

from __future__ import annotations

from collections.abc import Mapping

from quant.constants import DEFAULT_GROUP_SIZE
from quant.errors import QuantError
from quant.formats import compressed_tensors
from quant.formats.format import Format
from quant.formats.scheme import Scheme, wildcard_pattern
from quant.formats.weights import FP8_BLOCK
from quant.jsonfile import optional, show

NAME = "fp8"
WEIGHT, INPUT_SCALE = "weight", "input_scale"
SCALES = ("weight_scale", "weight_scale_inv")
SCALE_DTYPES = ("F32", "BF16", "F16")
ELEMENT = "F8_E4M3"

_REMEDY = "Choose a version of the model with E4M3 weights, scaled per tensor, per channel or in blocks of 128x128"


def is_config(data: Mapping[str, object]) -> bool:
    """Whether a `quantization_config` is in this format."""
    return data.get("quant_method") == NAME


def read_config(data: Mapping[str, object], source: str) -> Scheme:
    """Reads a `quantization_config`; `source` names it in errors. The tensors decide which linears are quantized.

    Raises QuantError for other elements than E4M3, and for blocks that are not 128x128.
    """
    said = optional(data, "fmt", str, source, _REMEDY) or "e4m3"
    if said != "e4m3":
        raise QuantError(f"{source}: fmt: expected 'e4m3', got {said!r}", _REMEDY)
    block = optional(data, "weight_block_size", list, source, _REMEDY)
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise QuantError(f"{source}: weight_block_size: expected [128, 128] or null, got {show(block)}", _REMEDY)
    names: list[object] = []
    for key in ("modules_to_not_convert", "ignored_layers"):
        names += optional(data, key, list, source, _REMEDY) or []
    if not all(isinstance(name, str) for name in names):
        raise QuantError(f"{source}: modules_to_not_convert: expected names, got {show(names)}", _REMEDY)
    return Scheme(
        NAME,
        source,
        compressed_tensors.LAYOUT,  # of NVFP4 linears, which this format has none of
        DEFAULT_GROUP_SIZE,
        tuple(wildcard_pattern(str(name)) for name in names) or None,
        elements=("E4M3",),
        w8a8=True,
        kv_cache=compressed_tensors.read_kv_cache(data, source),
    )


FORMAT = Format(
    name=NAME,
    maker="FP8",
    layout=compressed_tensors.LAYOUT,
    is_config=is_config,
    claims=is_config,
    read=read_config,
)
