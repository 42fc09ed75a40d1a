"""NVIDIA ModelOpt's NVFP4 (github.com/NVIDIA/Model-Optimizer), as written by its Hugging Face export. Torch-free.

Each linear [N, K] has three tensors, w = e2m1 * scale * scale_2:

    weight          uint8 [N, K/2], the even column in the low nibble
    weight_scale    float8_e4m3fn [N, K/g]
    weight_scale_2  float32 scalar, a **multiplier**

W4A4 models add `input_scale`. NVFP4_AWQ models may add `pre_quant_scale` [K], a factor on the layer's input:
y = W (x * pre_quant_scale).

The config is in one of two places, or in both:

    hf_quant_config.json                   {producer, quantization: {quant_algo, group_size, exclude_modules, ...}}
    config.json's quantization_config      {quant_algo, ignore, ...}
"""

from collections.abc import Mapping

from quant.constants import DEFAULT_GROUP_SIZE, GROUP_SIZES
from quant.errors import QuantError
from quant.formats.compressed_tensors import read_kv_cache
from quant.formats.format import Format, Written
from quant.formats.scheme import LinearLayout, Scheme, wildcard_pattern
from quant.formats.weights import Element
from quant.jsonfile import field, optional, show

# Values of `quant_method`; the first is the format's name.
QUANT_METHODS = ("modelopt", "modelopt_fp4")
NAME = QUANT_METHODS[0]
FILE_NAME = "hf_quant_config.json"
LAYOUT = LinearLayout("weight", "weight_scale", "weight_scale_2", "input_scale", divides=False)
PRE_QUANT_SCALE = "pre_quant_scale"

# Each quant_algo, and whether it quantizes activations too.
_ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False, "NVFP4_AWQ": True}
# Those of FP8, per tensor, per channel and in blocks (weights only).
_FP8 = {"FP8": True, "FP8_PER_CHANNEL_PER_TOKEN": True, "FP8_PB_WO": False}
_MIXED = "MIXED_PRECISION"
_REMEDY = "Choose an NVFP4, W4A16_NVFP4 or FP8 export of the model"
_LISTED = 8  # layers that a refusal spells out


def is_config(data: Mapping[str, object]) -> bool:
    """Whether `data` is ModelOpt's: by its method or producer, or by a quant_algo where both are missing."""
    producer = data.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == NAME
    return (
        named or data.get("quant_method") in QUANT_METHODS or (not data.get("quant_method") and _body(data) is not None)
    )


def is_ours(data: Mapping[str, object]) -> bool:
    """Whether the algorithm is a kind of NVFP4 or FP8, or a mixture, which is read or refused layer by layer."""
    algorithm = str((_body(data) or {}).get("quant_algo")).upper()
    return "NVFP4" in algorithm or algorithm in (_MIXED, *_FP8)


def read_config(data: Mapping[str, object], source: str) -> Scheme:
    """Reads either form; `source` names it in errors. If `exclude_modules` is missing, the tensors decide.

    Raises QuantError for another algorithm than those of NVFP4 and FP8, and for MIXED_PRECISION with any layer that is
    neither, listing those layers.
    """
    body = _body(data)
    if body is None:
        raise QuantError(f"{source}: quant_algo: expected NVFP4, got nothing", _REMEDY)
    algorithm = field(body, "quant_algo", str, source, _REMEDY).upper()
    used = _read_mixed(body, source) if algorithm == _MIXED else {algorithm}
    if algorithm != _MIXED and algorithm not in _ALGORITHMS | _FP8:
        expected = ", ".join((*_ALGORITHMS, *_FP8, _MIXED))
        raise QuantError(f"{source}: quant_algo: expected one of {expected}, got {algorithm!r}", _REMEDY)
    sizes = _group_sizes(body, source)
    if len(sizes) > 1:
        got = " and ".join(map(str, sorted(sizes)))
        raise QuantError(f"{source}: group_size: expected one for all layers, got {got}", _REMEDY)
    group_size = sizes.pop()
    if group_size not in GROUP_SIZES:
        raise QuantError(f"{source}: group_size: expected 16 or 32, got {group_size}", _REMEDY)
    wildcards = optional(body, "exclude_modules" if body is not data else "ignore", list, source, _REMEDY)
    if not all(isinstance(wildcard, str) for wildcard in wildcards or ()):
        raise QuantError(f"{source}: exclude_modules: expected names, got {show(wildcards)}", _REMEDY)
    return Scheme(
        NAME,
        source,
        LAYOUT,
        group_size,
        None if wildcards is None else tuple(map(wildcard_pattern, wildcards)),
        w4a4=any(_ALGORITHMS.get(one, False) for one in used),
        kv_cache=_read_kv_cache(body, source),
        pre_quant_scale="NVFP4_AWQ" in used,
        w8a8=any(_FP8.get(one, False) for one in used),
        elements=_elements(used),
    )


def _elements(algorithms: set[str]) -> tuple[Element, ...]:
    found: list[Element] = []
    if algorithms & _ALGORITHMS.keys():
        found.append("E2M1")
    if algorithms & _FP8.keys():
        found.append("E4M3")
    return tuple(found)


def write(scheme: Scheme, kept: tuple[str, ...]) -> Written:
    """What describes a model in this format: config.json and hf_quant_config.json say the same."""
    return Written(write_config(scheme, kept), {FILE_NAME: write_file(scheme, kept)})


def write_file(scheme: Scheme, exclude: tuple[str, ...]) -> dict[str, object]:
    """The contents of hf_quant_config.json. The model is quantized as `scheme` says, without the modules `exclude`."""
    quantization = {
        "quant_algo": _algorithm(scheme),
        "kv_cache_quant_algo": scheme.kv_cache.upper() or None,
        "group_size": scheme.group_size,
        "exclude_modules": list(exclude),
    }
    return {"producer": {"name": NAME, "version": "0.33.0"}, "quantization": quantization}


def write_config(scheme: Scheme, exclude: tuple[str, ...]) -> dict[str, object]:
    """The same as config.json's quantization_config."""
    weights = {"num_bits": 4, "type": "float", "group_size": scheme.group_size, "dynamic": False}
    group: dict[str, object] = {"targets": ["Linear"], "weights": weights}
    if scheme.w4a4:
        group["input_activations"] = weights
    config: dict[str, object] = {
        "quant_method": NAME,
        "quant_algo": _algorithm(scheme),
        "config_groups": {"group_0": group},
        "ignore": list(exclude),
    }
    if scheme.kv_cache == "fp8":
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    return config


def _algorithm(scheme: Scheme) -> str:
    if scheme.pre_quant_scale:
        return "NVFP4_AWQ"
    return "NVFP4" if scheme.w4a4 else "W4A16_NVFP4"


def _body(data: Mapping[str, object]) -> Mapping[str, object] | None:
    """The object that holds `quant_algo`, nested or flat."""
    nested = data.get("quantization")
    for body in (nested, data):
        if isinstance(body, dict) and "quant_algo" in body:
            return body
    return None


def _read_mixed(body: Mapping[str, object], source: str) -> set[str]:
    """The algorithms of the layers, if we serve them all."""
    layers = field(body, "quantized_layers", dict, source, _REMEDY)
    algorithms = {
        name: str(layer.get("quant_algo")).upper() if isinstance(layer, dict) else show(layer)
        for name, layer in layers.items()
    }
    served = _ALGORITHMS | _FP8
    unsupported = [f"{name} ({algorithm})" for name, algorithm in algorithms.items() if algorithm not in served]
    if unsupported or not algorithms:
        more = f" and {len(unsupported) - _LISTED} more" if len(unsupported) > _LISTED else ""
        listed = ", ".join(unsupported[:_LISTED]) + more or "none"
        raise QuantError(
            f"{source}: MIXED_PRECISION: expected NVFP4 and FP8 layers only, got {len(unsupported)} of "
            f"{len(algorithms)} layers in other formats: {listed}",
            _REMEDY,
        )
    return set(algorithms.values())


def _group_sizes(body: Mapping[str, object], source: str) -> set[int]:
    """The group sizes that the config names: once, per layer, or per group with compressed-tensors' keys.

    NVFP4's own if it names none.
    """
    if size := optional(body, "group_size", int, source, _REMEDY):
        return {size}
    entries: list[object] = []
    for key in ("quantized_layers", "config_groups"):
        entries += (optional(body, key, dict, source, _REMEDY) or {}).values()
    holders = [entry.get("weights", entry) for entry in entries if isinstance(entry, dict)]
    return {
        size for holder in holders if isinstance(holder, dict) and isinstance(size := holder.get("group_size"), int)
    } or {DEFAULT_GROUP_SIZE}


def _read_kv_cache(body: Mapping[str, object], source: str) -> str:
    algorithm = optional(body, "kv_cache_quant_algo", str, source, _REMEDY)
    if algorithm is None:
        return read_kv_cache(body, source)
    if algorithm.upper() not in ("FP8", "NVFP4"):
        raise QuantError(f"{source}: kv_cache_quant_algo: expected FP8, NVFP4 or null, got {algorithm!r}", _REMEDY)
    return algorithm.lower()


FORMAT = Format(
    name=NAME,
    maker="ModelOpt",
    aliases=QUANT_METHODS[1:],
    layout=LAYOUT,
    runtime_tensors=(PRE_QUANT_SCALE,),
    files=(FILE_NAME,),
    is_config=is_config,
    claims=is_ours,
    read=read_config,
    write=write,
    group_sizes=(DEFAULT_GROUP_SIZE,),
    kv_caches=("", "fp8", "nvfp4"),
)
