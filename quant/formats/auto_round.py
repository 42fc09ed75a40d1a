"""AutoRound's own NVFP4 export (github.com/intel/auto-round), `packing_format: auto_round:llm_compressor`. Torch-free.

The tensors are compressed-tensors'. The config is

    {quant_method, packing_format, bits, group_size, data_type, act_bits,
     extra_config: {module or pattern: {bits, ...}}, block_name_to_quantize}

`extra_config` lists exceptions inside the quantized blocks. Nothing lists the modules outside them, so the tensors
decide which modules are quantized.
"""

from collections.abc import Mapping

from quant.constants import GROUP_SIZES
from quant.errors import QuantError
from quant.formats import compressed_tensors
from quant.formats.format import Format
from quant.formats.scheme import Scheme
from quant.jsonfile import field, optional, show

QUANT_METHOD = "auto-round"
PACKING = "auto_round:llm_compressor"
# "nv_fp", or a longer name with a rounding or activation variant.
_DATA_TYPE = "nv_fp"
_REMEDY = "Export the model with AutoRound's NVFP4 scheme, or choose a compressed-tensors or ModelOpt NVFP4 model"


def is_config(data: Mapping[str, object]) -> bool:
    """Whether a `quantization_config` is in this format."""
    return data.get("quant_method") == QUANT_METHOD


def is_nvfp4(data: Mapping[str, object]) -> bool:
    """Whether it is a 4-bit float export: NVFP4, its E5M3 variant or MXFP4."""
    return str(data.get("packing_format")).startswith(PACKING)


def read_config(data: Mapping[str, object], source: str) -> Scheme:
    """Reads a `quantization_config`; `source` names it in errors.

    Raises QuantError for another packing or data type (it names E5M3 block scales and MXFP4), and for layers whose bits
    are neither 4 nor 16.
    """
    packing = field(data, "packing_format", str, source, _REMEDY)
    data_type = field(data, "data_type", str, source, _REMEDY)
    if "e5m3" in packing or data_type in ("nvfp4_v2", "fp4_v2"):
        raise QuantError(
            f"{source}: expected NVFP4 with E4M3 block scales, got the E5M3 variant ({packing}, {data_type})", _REMEDY
        )
    if data_type.startswith("mx_fp"):
        raise QuantError(f"{source}: data_type: expected {_DATA_TYPE!r} (NVFP4), got {data_type!r} (MXFP4)", _REMEDY)
    for key, got, expected in (("packing_format", packing, PACKING), ("data_type", data_type, _DATA_TYPE)):
        if not got.startswith(expected):
            raise QuantError(f"{source}: {key}: expected {expected!r}, got {got!r}", _REMEDY)
    if (bits := field(data, "bits", int, source, _REMEDY)) != 4:
        raise QuantError(f"{source}: bits: expected 4, got {bits}", _REMEDY)
    group_size = field(data, "group_size", int, source, _REMEDY)
    if group_size not in GROUP_SIZES:
        raise QuantError(f"{source}: group_size: expected 16 or 32, got {group_size}", _REMEDY)
    w4a4 = (optional(data, "act_bits", int, source, _REMEDY) or 16) < 16
    for name, settings in (optional(data, "extra_config", dict, source, _REMEDY) or {}).items():
        layer_bits = settings.get("bits", 4) if isinstance(settings, dict) else settings
        if layer_bits not in (4, 16, 32):
            raise QuantError(f"{source}: extra_config: {name}: expected 4 or 16 bits, got {show(layer_bits)}", _REMEDY)
    return Scheme(QUANT_METHOD, source, compressed_tensors.LAYOUT, group_size, None, w4a4=w4a4)


FORMAT = Format(
    name=QUANT_METHOD,
    maker="AutoRound",
    layout=compressed_tensors.LAYOUT,
    is_config=is_config,
    claims=is_nvfp4,
    read=read_config,
)
