"""compressed-tensors' floats: `nvfp4-pack-quantized`, `float-quantized` (FP8), and both in one `mixed-precision` model.

github.com/vllm-project/compressed-tensors. FP8 linears: quant/formats/fp8.py. NVFP4:

Each linear [N, K] has three tensors, w = e2m1 * scale / global:

    weight_packed        uint8 [N, K/2], the even column in the low nibble
    weight_scale         float8_e4m3fn [N, K/g]
    weight_global_scale  float32 [1], a **divisor**

Models that also quantize activations (W4A4) add `input_global_scale`, which reading weights does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.constants import DEFAULT_GROUP_SIZE, GROUP_SIZES
from quant.errors import QuantError
from quant.formats.format import Format, Written
from quant.formats.scheme import LinearLayout, Scheme
from quant.formats.weights import FP8_BLOCK, Element
from quant.jsonfile import field, optional, show

if TYPE_CHECKING:
    import torch

    from quant.tensor import NVFP4Tensor

QUANT_METHOD = "compressed-tensors"
PACKING = "nvfp4-pack-quantized"
# Names of formats, of a whole model or of a group. A mixed model says per group which of the others it is.
FLOAT, MIXED = "float-quantized", "mixed-precision"
PACKED, SCALE, GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"
LAYOUT = LinearLayout(PACKED, SCALE, GLOBAL, "input_global_scale", divides=True)

_REMEDY = "Check that the model is compressed-tensors NVFP4 and download it again"
_UNSERVED = "The file is not damaged, but layers like these are not served: choose a version in NVFP4, FP8 or both"

_OTHER_CACHE = "Choose a version of the model with a 16-bit or FP8 key/value cache"


def write_config(
    group_size: int, ignore: tuple[str, ...], *, w4a4: bool = False, kv_cache: str = ""
) -> dict[str, object]:
    """A model's `quantization_config`. Group size 32 is the same format with another `group_size`."""
    common = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group_size, "symmetric": True}
    weights = {**common, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}
    activations = {**common, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"} if w4a4 else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": QUANT_METHOD,
        "format": PACKING,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False} if kv_cache == "fp8" else None,
    }


def write(scheme: Scheme, kept: tuple[str, ...]) -> Written:
    """What describes a model in this format. A config that was exact keeps its `ignore`, patterns included."""
    ignore = scheme.ignore if scheme.format == QUANT_METHOD and scheme.ignore else kept
    return Written(write_config(scheme.group_size, ignore, w4a4=scheme.w4a4, kv_cache=scheme.kv_cache))


def is_config(data: Mapping[str, object]) -> bool:
    """Whether a `quantization_config` is in this format."""
    return data.get("quant_method") == QUANT_METHOD


def is_ours(data: Mapping[str, object]) -> bool:
    """Whether all the weights that a `quantization_config` of this format quantizes are NVFP4 or FP8."""
    groups = data.get("config_groups")
    said = (
        [group.get("format") if isinstance(group, dict) else None for group in groups.values()]
        if isinstance(groups, dict)
        else []
    )
    return {data.get("format"), *(name or data.get("format") for name in said)} <= {PACKING, FLOAT, MIXED}


def read_config(data: Mapping[str, object], source: str) -> Scheme:
    """Reads a `quantization_config`; `source` names it in errors.

    Accepts what published models have: the weight strategies `tensor_group` and `group`, and files without keys that
    have defaults (`ignore`, `scale_dtype`, `symmetric`, `dynamic`). With FP8 groups, or groups that target modules by
    name, the tensors decide which linears are quantized and how. Raises QuantError, naming the group, for anything
    that is neither NVFP4 nor FP8, and for NVFP4 groups of different sizes.
    """
    for key, accepted in (("quant_method", (QUANT_METHOD,)), ("format", (PACKING, FLOAT, MIXED))):
        if (got := field(data, key, str, source, _REMEDY)) not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise QuantError(f"{source}: {key}: expected {expected}, got {got!r}", _UNSERVED)
    ignore = optional(data, "ignore", list, source, _REMEDY) or []
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise QuantError(f"{source}: ignore: expected names, got {show(ignore)}", _REMEDY)
    groups = field(data, "config_groups", dict, source, _REMEDY)
    found = [_read_group(groups, key, f"{source}: config_groups") for key in groups]
    sizes = {group.group_size for group in found if group.group_size is not None}
    if not found or len(sizes) > 1:
        got = " and ".join(map(str, sorted(sizes))) or "no group"
        raise QuantError(f"{source}: config_groups: expected one NVFP4 group_size for all, got {got}", _UNSERVED)
    by_class = all(group.targets == ("Linear",) for group in found)
    return Scheme(
        QUANT_METHOD,
        source,
        LAYOUT,
        sizes.pop() if sizes else DEFAULT_GROUP_SIZE,
        tuple(ignore) if by_class else None,
        w4a4=any(group.activations and group.element == "E2M1" for group in found),
        w8a8=any(group.activations and group.element == "E4M3" for group in found),
        kv_cache=read_kv_cache(data, source),
        elements=tuple(sorted({group.element for group in found})),
        by_tensors=not by_class or any(group.element == "E4M3" for group in found),
    )


def scheme(
    group_size: int, ignore: tuple[str, ...], source: str = "", *, w4a4: bool = False, kv_cache: str = ""
) -> Scheme:
    """The scheme of a compressed-tensors model."""
    return Scheme(QUANT_METHOD, source, LAYOUT, group_size, ignore, w4a4=w4a4, kv_cache=kv_cache)


def layout(rows: int, columns: int, group_size: int) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """(suffix, dtype, shape) of the tensors of a linear [rows, columns]."""
    from quant.safetensors_file import DTYPES

    return tuple((suffix, DTYPES[dtype], shape) for suffix, dtype, shape in LAYOUT.parts(rows, columns, group_size))


def read_linear(tensors: Mapping[str, torch.Tensor], name: str, group_size: int) -> NVFP4Tensor:
    """The linear `name` from its tensors, keyed by suffix. Raises as quant/formats/linear.py says."""
    from quant.formats import linear

    return linear.read_linear(LAYOUT, tensors, name, group_size)


def write_linear(tensor: NVFP4Tensor, name: str) -> dict[str, torch.Tensor]:
    """The tensors of the linear `name`, keyed by suffix. Raises as quant/formats/linear.py says."""
    from quant.formats import linear

    return linear.write_linear(LAYOUT, tensor, name)


def read_kv_cache(data: Mapping[str, object], source: str) -> str:
    """The cache that `kv_cache_scheme` asks for: "fp8", "nvfp4" or "". Raises QuantError for anything else."""
    if isinstance(said := data.get("kv_cache_scheme"), str):  # ModelOpt names caches that no object describes
        if said.upper() not in ("FP8", "NVFP4"):
            problem = f"{source}: kv_cache_scheme: expected FP8, NVFP4 or null, got {said!r}"
            raise QuantError(problem, _OTHER_CACHE)
        return said.lower()
    scheme = optional(data, "kv_cache_scheme", dict, source, _REMEDY)
    if not scheme:
        return ""
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        got = f"{show(scheme.get('type'))} of {show(scheme.get('num_bits'))} bits"
        raise QuantError(
            f"{source}: kv_cache_scheme: expected an 8-bit float key/value cache or null, got {got}", _OTHER_CACHE
        )
    return "fp8"


# A key of a group's `weights`, its default and the values that are served.
_Accepted = tuple[tuple[str, object, tuple[object, ...]], ...]
_EITHER: _Accepted = (
    ("num_bits", None, (4, 8)),
    ("type", None, ("float",)),
    ("symmetric", True, (True,)),
    ("dynamic", False, (False,)),
)
_NVFP4: _Accepted = (
    ("strategy", "group", ("tensor_group", "group")),
    ("group_size", None, GROUP_SIZES),
    ("scale_dtype", None, (None, "torch.float8_e4m3fn")),
)
_FP8: _Accepted = (
    ("strategy", "tensor", ("tensor", "channel", "block")),
    ("group_size", None, (None,)),
    ("block_structure", None, (None, [FP8_BLOCK, FP8_BLOCK])),
)


@dataclass(frozen=True)
class _Group:
    """What a group of the config says of its linears; `group_size` of NVFP4 only."""

    element: Element
    group_size: int | None
    activations: bool
    targets: tuple[str, ...]


def _read_group(groups: Mapping[str, object], key: str, source: str) -> _Group:
    group = field(groups, key, dict, source, _REMEDY)
    source = f"{source}.{key}"
    if (got := group.get("format")) not in (None, PACKING, FLOAT):
        raise QuantError(f"{source}.format: expected {PACKING!r} or {FLOAT!r}, got {got!r}", _UNSERVED)
    targets = field(group, "targets", list, source, _REMEDY)
    if not targets or not all(isinstance(target, str) for target in targets):
        raise QuantError(f"{source}.targets: expected classes, names or patterns, got {show(targets)}", _REMEDY)
    weights = field(group, "weights", dict, source, _REMEDY)
    is_fp8 = weights.get("num_bits") == 8
    for name, default, values in _EITHER + (_FP8 if is_fp8 else _NVFP4):
        if (value := weights.get(name, default)) not in values:
            expected = " or ".join(map(show, values))
            raise QuantError(f"{source}.weights.{name}: expected {expected}, got {show(value)}", _UNSERVED)
    activations = group.get("input_activations") is not None
    size = weights.get("group_size")
    return _Group("E4M3" if is_fp8 else "E2M1", size if isinstance(size, int) else None, activations, tuple(targets))


FORMAT = Format(
    name=QUANT_METHOD,
    maker="compressed-tensors",
    layout=LAYOUT,
    is_config=is_config,
    claims=is_ours,
    read=read_config,
    ignore_is_exact=True,
    write=write,
)
