"""Compares the quantized linears in the headers with the config. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quant.constants import DEFAULT_GROUP_SIZE, GROUP_SIZES
from quant.formats import fp8, modelopt, registry
from quant.formats.scheme import LinearLayout, Scheme
from quant.formats.weights import WeightKind, fp8_kind, nvfp4
from quant.selection import matching_pattern, siblings
from quant.verify.files import Tensor
from quant.verify.findings import Finding, error, info, list_some, warning
from quant.verify.tensor_parallel import SPLIT_INPUTS, SPLIT_OUTPUTS

KV_SCALES = ("k_scale", "v_scale")

_AGAIN = "Download the model again; if its source is the same, the model is damaged or mislabelled"
_CONFIG = "Restore config.json from the model's source; if it is the same there, the model is mislabelled"
_MOST_LAYERS = 10_000  # a config that declares more is wrong, however many there are
_FLOATS = ("F16", "BF16", "F32")


@dataclass
class Modules:
    """The model's modules by the kind of their tensors: quantized linears, 16-bit weights, and the rest.

    nvfp4: module to (N, K, group size, layout). fp8: module to (N, K, kind). plain: module to shape. foreign: module
    to a description. kv_scales: tensor names of key/value cache scales. pre_quant_scales: module to K.
    """

    nvfp4: dict[str, tuple[int, int, int, LinearLayout]] = field(default_factory=dict)
    fp8: dict[str, tuple[int, int, WeightKind]] = field(default_factory=dict)
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    kv_scales: list[str] = field(default_factory=list)
    pre_quant_scales: dict[str, int] = field(default_factory=dict)

    @property
    def quantized(self) -> dict[str, tuple[int, int, WeightKind]]:
        """Every quantized linear: module to (N, K, kind)."""
        fours = {module: (rows, columns, nvfp4(size)) for module, (rows, columns, size, _) in self.nvfp4.items()}
        return fours | self.fp8


def sort_modules(tensors: Mapping[str, Tensor]) -> tuple[Modules, list[Finding]]:
    """Sorts all tensors into modules, without regard to the config. Findings name tensors that do not fit together."""
    modules = Modules()
    findings: list[Finding] = []
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        parts.setdefault(module, {})[suffix] = tensor
        if suffix in KV_SCALES:
            modules.kv_scales.append(name)
    layouts = registry.layouts()
    weights, scales = _weight_names(layouts), {*(layout.scales for layout in layouts), *fp8.SCALES}
    for module, own in parts.items():
        layout = next((layout for layout in layouts if _has_codes(own, layout)), None)
        if layout is not None:
            findings += _sort_quantized(module, own, layout, modules)
        elif fp8.WEIGHT in own and own[fp8.WEIGHT].entry.dtype == fp8.ELEMENT:
            findings += _sort_fp8(module, own, modules)
        elif weight := next((own[name] for name in weights if name in own), None):
            _sort_plain(module, own, weight, modules)
        elif alone := sorted(scales & own.keys()):
            got = f"a {alone[0]} without its weight"
            findings.append(error("missing-tensor", own[alone[0]].shard, module, "a whole linear", got, _AGAIN))
    return modules, findings


def _has_codes(own: Mapping[str, Tensor], layout: LinearLayout) -> bool:
    """Whether these are 4-bit codes: bytes, with the scales that belong to them."""
    codes = own.get(layout.codes)
    if codes is None or codes.entry.dtype != "U8":
        return False
    scales = own.get(layout.scales)
    return layout.global_scale in own or (scales is not None and scales.entry.dtype != "U8") or len(own) == 1


def _sort_quantized(module: str, own: Mapping[str, Tensor], layout: LinearLayout, modules: Modules) -> list[Finding]:
    """Adds the linear to `modules` if its tensors fit together. Otherwise returns findings."""
    missing = [suffix for suffix in (layout.codes, layout.scales, layout.global_scale) if suffix not in own]
    if missing:
        shard = next(iter(own.values())).shard
        return [error("missing-tensor", shard, f"{module}.{missing[0]}", "a tensor", "nothing", _AGAIN)]
    codes, scales = own[layout.codes].entry, own[layout.scales].entry
    if len(codes.shape) != 2 or not all(codes.shape):
        return [_shape(own, module, layout.codes, "[N, K/2]")]
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    blocks = scales.shape[-1] if scales.shape else 0
    group_size = columns // blocks if blocks and columns % blocks == 0 else 0
    if group_size not in GROUP_SIZES:
        group_size = DEFAULT_GROUP_SIZE
    findings = []
    for suffix, dtype, shape in layout.parts(rows, columns, group_size):
        got = own[suffix].entry
        shapes = (shape, ()) if suffix == layout.global_scale else (shape,)
        if got.dtype != dtype:
            findings.append(
                error(
                    "dtype", own[suffix].shard, f"{module}.{suffix}", f"{dtype} {list(shape)}", _describe(got), _AGAIN
                )
            )
        elif got.shape not in shapes:
            findings.append(_shape(own, module, suffix, f"{dtype} {list(shape)}"))
    if modelopt.PRE_QUANT_SCALE in own:
        shape = own[modelopt.PRE_QUANT_SCALE].entry.shape
        if shape != (columns,):
            findings.append(_shape(own, module, modelopt.PRE_QUANT_SCALE, f"[{columns}]"))
        modules.pre_quant_scales[module] = columns
    if not findings:
        modules.nvfp4[module] = (rows, columns, group_size, layout)
    return findings


def _sort_fp8(module: str, own: Mapping[str, Tensor], modules: Modules) -> list[Finding]:
    """Adds the E4M3 linear to `modules` if its tensors fit together. Otherwise returns findings."""
    weight = own[fp8.WEIGHT].entry
    if len(weight.shape) != 2 or not all(weight.shape):
        modules.foreign[module] = f"FP8 of {len(weight.shape)} dimensions ({fp8.ELEMENT} {list(weight.shape)})"
        return []
    scales = [suffix for suffix in fp8.SCALES if suffix in own]
    if len(scales) != 1:
        got = " and ".join(scales) or "nothing"
        name = f"{module}.{scales[0] if scales else fp8.SCALES[0]}"
        return [
            error("missing-tensor", own[fp8.WEIGHT].shard, name, "one scale tensor of its E4M3 weight", got, _AGAIN)
        ]
    scale = own[scales[0]].entry
    if scale.dtype not in fp8.SCALE_DTYPES:
        expected = " or ".join(fp8.SCALE_DTYPES)
        name = f"{module}.{scales[0]}"
        return [error("dtype", own[scales[0]].shard, name, expected, f"{_describe(scale)} beside FP8", _AGAIN)]
    kind = fp8_kind(*weight.shape, scale.shape)
    if kind is None:
        return [_shape(own, module, scales[0], "one scale, one per row, or one per 128x128 block")]
    modules.fp8[module] = (weight.shape[0], weight.shape[1], kind)
    return []


def _weight_names(layouts: Iterable[LinearLayout]) -> tuple[str, ...]:
    """Names under which a linear's weight is stored, in 16 bits, in a format of ours or as GPTQ and AWQ do."""
    return tuple(dict.fromkeys(("weight", *(layout.codes for layout in layouts), "qweight")))


def _sort_plain(module: str, own: Mapping[str, Tensor], weight: Tensor, modules: Modules) -> None:
    dtype = weight.entry.dtype
    if dtype in _FLOATS or dtype == "F64":
        modules.plain[module] = weight.entry.shape
    elif dtype.startswith("F8_"):
        modules.foreign[module] = f"FP8 ({dtype} weights)"
    elif "weight_packed" in own and "weight_scale" in own and own["weight_scale"].entry.dtype in ("U8", "F8_E8M0"):
        modules.foreign[module] = "MXFP4 (U8 codes with power-of-two E8M0 scales), or NVFP4 with E5M3 scales"
    else:
        modules.foreign[module] = f"{dtype} weights ({', '.join(sorted(own))})"


def compare_with_scheme(scheme: Scheme | None, modules: Modules, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Finds disagreements between tensors and config, and tensors of another format than the config names."""
    findings = []
    by_kind: dict[str, list[str]] = {}
    for module, kind in modules.foreign.items():
        by_kind.setdefault(kind, []).append(module)
    for kind, names in by_kind.items():
        shard = _shard_of(names[0], tensors)
        expected = (
            "NVFP4, FP8 (E4M3) or 16-bit weights"
            if scheme
            else "16-bit weights, as config.json declares no quantization"
        )
        got = f"{kind} in {len(names)} modules: {list_some(names)}"
        findings.append(
            error("format", shard, names[0], expected, got, "Choose a model whose layers are all NVFP4, FP8 or 16-bit")
        )
    if scheme is None:
        if modules.quantized:
            name, (*_, first) = next(iter(modules.quantized.items()))
            got = f"{len(modules.quantized)} quantized linears, {first} among them"
            findings.append(
                error("config", _shard_of(name, tensors), name, "16-bit weights, as config.json says", got, _CONFIG)
            )
        return findings
    findings += _compare_elements(scheme, modules, tensors)
    judge = error if registry.ignore_is_exact(scheme) else warning
    for module, (_, columns, group_size, layout) in modules.nvfp4.items():
        shard = _shard_of(module, tensors)
        if layout != scheme.layout:
            expected = f"{scheme.format} tensors ({scheme.layout.global_scale})"
            findings.append(error("config", shard, module, expected, f"{layout.global_scale}", _CONFIG))
        elif group_size != scheme.group_size:
            expected = f"block size {scheme.group_size}, as {scheme.source} says"
            findings.append(error("config", shard, module, expected, f"{group_size} (K={columns})", _CONFIG))
        elif pattern := matching_pattern(module, scheme.ignore or ()):
            expected = f"16-bit weights, as {scheme.source} ignores {pattern!r}"
            # Where the list is not exact the tensors decide, and are unambiguous here (engine/layers/quantization.py).
            judged = warning if scheme.by_tensors else error
            findings.append(judged("config", shard, module, expected, "NVFP4", _CONFIG))
    if scheme.ignore is not None:
        # Engines rely on an exact list. Otherwise the tensors decide (engine/layers/quantization.py).
        for module, shape in modules.plain.items():
            is_linear = len(shape) == 2 and module.rpartition(".")[2] in SPLIT_INPUTS + SPLIT_OUTPUTS
            is_loaded = ".mtp." not in f".{module}"  # draft layers are loaded for speculative decoding only
            if is_linear and is_loaded and not matching_pattern(module, scheme.ignore):
                expected = f"quantized weights, as {scheme.source} does not ignore it"
                findings.append(
                    judge("config", _shard_of(module, tensors), module, expected, "16-bit weights", _CONFIG)
                )
    return _limited(findings) + _odd(scheme, modules)


def _compare_elements(scheme: Scheme, modules: Modules, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Finds kinds of linears that the config names and no tensor has, or the other way round."""
    findings = []
    for element, name, found in (("E2M1", "NVFP4", list(modules.nvfp4)), ("E4M3", "FP8", list(modules.fp8))):
        if element in scheme.elements and not found:
            findings.append(error("config", "", "", f"{name} linears, as {scheme.source} says", "none", _CONFIG))
        elif found and element not in scheme.elements:
            expected = f"no {name} linears, as {scheme.source} names none"
            # FP8 linears are known by their tensors, which engines look at unless an exact list makes that needless.
            served = element == "E4M3" and not registry.ignore_is_exact(scheme)
            judge, remedy = (warning, "None needed: their tensors say what they are") if served else (error, _CONFIG)
            got = f"{len(found)}: {list_some(found)}"
            findings.append(judge("config", _shard_of(found[0], tensors), found[0], expected, got, remedy))
    return findings


def compare_siblings(modules: Modules) -> list[Finding]:
    """Checks layers that engines fuse: quantized all or none, with equal K and group size."""
    findings = _mixed_siblings(modules)
    for module in modules.nvfp4:
        members = [name for name in siblings(module) if name in modules.nvfp4 or name in modules.plain]
        if plain := [name for name in members if name in modules.plain]:
            expected = "fused layers to be quantized all or none"
            got = f"16-bit {list_some(plain)} beside NVFP4"
            findings.append(error("fused", "", module, expected, got, _AGAIN))
        elif len(members) > 1 and members[0] == module:
            if len(layouts := {modules.nvfp4[name][1:3] for name in members}) > 1:
                got = " and ".join(f"K={columns}, block size {size}" for columns, size in sorted(layouts))
                findings.append(
                    error("fused", "", module, f"one K and block size for {list_some(members)}", got, _AGAIN)
                )
    return _limited(findings)


def _mixed_siblings(modules: Modules) -> list[Finding]:
    """Finds layers that engines fuse and of which FP8 members stand beside others."""
    findings: list[Finding] = []
    for module in modules.fp8:
        members = [name for name in siblings(module) if name in modules.quantized or name in modules.plain]
        kinds = {
            "NVFP4" if name in modules.nvfp4 else "16-bit" if name in modules.plain else _rows_of(modules.fp8[name][2])
            for name in members
        }
        if len(kinds) > 1 and next(name for name in members if name in modules.fp8) == module:
            got = f"{' beside '.join(sorted(kinds))}: {list_some(members)}"
            findings.append(error("fused", "", module, "one kind of weights in layers that are fused", got, _AGAIN))
    return findings


def _rows_of(kind: WeightKind) -> str:
    """What members of a fused layer must have in common: a scale per tensor is spread over its rows."""
    return "FP8 in blocks" if kind.columns else "FP8"


def compare_globals(modules: Modules, globals_: Mapping[str, float]) -> list[Finding]:
    """Finds layers that engines fuse and whose global scales differ (info)."""
    fused = different = 0
    largest = 1.0
    first = ""
    for module in modules.nvfp4:
        members = [name for name in siblings(module) if name in modules.nvfp4 or name in modules.plain]
        if len(members) < 2 or members[0] != module or any(name in modules.plain for name in members):
            continue
        fused += 1
        values = [globals_[name] for name in members if globals_.get(name, 0) > 0]
        if len(values) == len(members) and len(set(values)) > 1:
            different += 1
            first = first or module
            largest = max(largest, max(values) / min(values))
    if not different:
        return []
    got = f"different ones in {different} of {fused} fused layers, up to {largest:.2f} times"
    remedy = "None needed: each row keeps its own factor, exactly"
    return [info("fused-globals", "", first, "one global scale for fused layers", got, remedy)]


def compare_with_config(config: Mapping[str, object], modules: Modules, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Compares config.json's sizes with the tensors', and finds declared layers without tensors."""
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    findings = []
    shapes = {module: shape for module, shape in modules.plain.items() if len(shape) == 2}
    shapes |= {module: (rows, columns) for module, (rows, columns, _) in modules.quantized.items()}
    for suffix, dimension, key in (
        ("embed_tokens", 0, "vocab_size"),
        ("embed_tokens", 1, "hidden_size"),
        ("self_attn.k_proj", 1, "hidden_size"),
        ("mlp.gate_proj", 0, "intermediate_size"),
        ("mlp.down_proj", 1, "intermediate_size"),
    ):
        declared = sizes.get(key)
        for module, shape in shapes.items():
            in_text_model = not any(tower in module for tower in ("visual", "vision", "audio"))
            if isinstance(declared, int) and in_text_model and f".{module}".endswith(f".{suffix}"):
                # Only an embedding may be padded.
                fits = shape[dimension] >= declared if key == "vocab_size" else shape[dimension] == declared
                if not fits:
                    got = f"{'NK'[dimension]}={shape[dimension]} of {list(shape)}"
                    expected = f"{key} {declared} as in config.json"
                    findings.append(error("shape", _shard_of(module, tensors), module, expected, got, _CONFIG))
    untied = False in (config.get("tie_word_embeddings"), sizes.get("tie_word_embeddings"))
    if untied and any("embed_tokens" in name for name in tensors) and not any("lm_head" in name for name in tensors):
        expected = "a head of its own, as config.json declares tie_word_embeddings false"
        findings.append(error("missing-tensor", "", "lm_head.weight", expected, "nothing", _AGAIN))
    return _limited(findings) + _absent_layers(sizes, tensors)


def _absent_layers(sizes: Mapping[str, object], tensors: Mapping[str, Tensor]) -> list[Finding]:
    present: dict[str, set[int]] = {}
    for name in tensors:
        before, found, after = name.partition("layers.")
        number = after.partition(".")[0]
        if found and number.isdecimal():
            present.setdefault(before, set()).add(int(number))
    findings = []
    declared = sizes.get("num_hidden_layers")
    trunk = [before for before in present if not any(side in before for side in ("mtp", "visual", "vision", "audio"))]
    numbers = set().union(*(present[before] for before in trunk))
    expected_layers = min(declared, _MOST_LAYERS) if isinstance(declared, int) and trunk else 0
    if absent := [str(number) for number in range(expected_layers) if number not in numbers]:
        got = f"no tensors for {len(absent)} layers: {list_some(absent)}"
        findings.append(error("absent-layer", "", "", f"{declared} layers as in config.json", got, _AGAIN))
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        count = sizes.get(key)
        has_mtp = any("mtp" in name for name in tensors) or (isinstance(declared, int) and declared in numbers)
        if isinstance(count, int) and count > 0 and not has_mtp:
            expected = f"MTP layers, as config.json declares {key} {count}"
            remedy = "None needed: the model is served without speculative decoding by MTP"
            findings.append(warning("absent-layer", "", "", expected, "no mtp tensors", remedy))
    return findings


def _odd(scheme: Scheme, modules: Modules) -> list[Finding]:
    findings = []
    if scheme.pre_quant_scale and not modules.pre_quant_scales:
        expected = "pre_quant_scale tensors, as NVFP4_AWQ models have"
        remedy = "None needed where the export folded them into norms and weights; otherwise the model is damaged"
        findings.append(info("awq", "", "", expected, "none", remedy))
    if modules.pre_quant_scales and not scheme.pre_quant_scale:
        name = next(iter(modules.pre_quant_scales))
        findings.append(error("config", "", name, f"no pre_quant_scale, as {scheme.source} says", "one", _CONFIG))
    if scheme.kv_cache or modules.kv_scales:
        expected = "a 16-bit key/value cache"
        kind = scheme.kv_cache.upper() or "no"
        got = f"{kind} cache in the config and {len(modules.kv_scales)} k_scale/v_scale tensors"
        remedy = "None needed: V100 has no FP8; serve with --kv-cache-dtype float16 (the V100 presets do)"
        findings.append(info("kv-cache", "", "", expected, got, remedy))
    if scheme.w8a8:
        remedy = "None needed: V100 has no FP8 arithmetic; activations stay in 16 bits, at least as accurate"
        findings.append(info("activations", "", "", "16-bit activations", "a W8A8 model", remedy))
    if scheme.w4a4:
        remedy = "None needed: V100 has no FP4 arithmetic; activations stay in 16 bits, at least as accurate"
        findings.append(info("activations", "", "", "16-bit activations", "a W4A4 model", remedy))
    return findings


def _limited(findings: list[Finding], most: int = 20) -> list[Finding]:
    """The first findings of each check, and one with the number of the rest. A wrong config is wrong in every layer."""
    kept = []
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.check] = counts.get(finding.check, 0) + 1
        if counts[finding.check] <= most:
            kept.append(finding)
    for check, count in counts.items():
        if count > most:
            kept.append(error(check, "", "", "no more of these", f"{count - most} more findings of {check!r}", _AGAIN))
    return kept


def _shape(own: Mapping[str, Tensor], module: str, suffix: str, expected: str) -> Finding:
    return error("shape", own[suffix].shard, f"{module}.{suffix}", expected, _describe(own[suffix].entry), _AGAIN)


def _describe(entry: object) -> str:
    return f"{getattr(entry, 'dtype', '')} {list(getattr(entry, 'shape', ()))}"


def _shard_of(module: str, tensors: Mapping[str, Tensor]) -> str:
    layouts = registry.layouts()
    for suffix in (*_weight_names(layouts), *(layout.scales for layout in layouts), *fp8.SCALES):
        if (tensor := tensors.get(f"{module}.{suffix}")) is not None:
            return tensor.shard
    return ""
