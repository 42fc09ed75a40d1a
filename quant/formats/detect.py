"""Which format a checkpoint is in: a table of those that are read, and of those only recognised. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quant.errors import QuantError
from quant.formats import auto_round, compressed_tensors, modelopt, quantize_config
from quant.formats.others import OTHERS
from quant.formats.scheme import Scheme
from quant.jsonfile import optional, read_object

CONFIG = "config.json"
_REMEDY = "Restore the model's files from its source"


@dataclass(frozen=True)
class Format:
    """A format of `quantization_config`.

    is_config: whether a config is in this format. is_nvfp4: whether one that is means NVFP4, or a variant near enough
    that our reason for refusing it is the best answer. read: what it says, or QuantError.
    """

    name: str
    is_config: Callable[[Mapping[str, object]], bool]
    is_nvfp4: Callable[[Mapping[str, object]], bool]
    read: Callable[[Mapping[str, object], str], Scheme]


FORMATS = (
    Format(
        compressed_tensors.QUANT_METHOD,
        lambda data: data.get("quant_method") == compressed_tensors.QUANT_METHOD,
        compressed_tensors.is_nvfp4,
        compressed_tensors.read_config,
    ),
    Format(
        auto_round.QUANT_METHOD,
        lambda data: data.get("quant_method") == auto_round.QUANT_METHOD,
        auto_round.is_nvfp4,
        auto_round.read_config,
    ),
    Format("modelopt", modelopt.is_config, modelopt.is_nvfp4, modelopt.read_config),
)


def detect(directory: Path) -> Scheme | None:
    """What the configs in `directory` say of its quantization; None when they declare none (a 16-bit model).

    Raises QuantError, with the reason and remedy, for a format that is not read here, a config that is malformed, and
    configs that contradict each other.
    """
    config = read_object(
        directory / CONFIG, "Name a model directory: config.json, safetensors shards and tokenizer files"
    )
    return detect_config(directory, config)


def detect_config(directory: Path, config: Mapping[str, object]) -> Scheme | None:
    """`detect`, with config.json read already."""
    schemes = []
    if (data := quantization_config(config, directory / CONFIG)) is not None:
        schemes.append(read_scheme(data, f"{directory / CONFIG}: quantization_config"))
    if (path := directory / modelopt.FILE_NAME).exists():
        schemes.append(modelopt.read_config(read_object(path, _REMEDY), str(path)))
    if (path := directory / quantize_config.FILE_NAME).exists():
        block_size = quantize_config.read(directory).block_size
        layout = schemes[0].layout if schemes else compressed_tensors.LAYOUT
        schemes.append(Scheme(quantize_config.FORMAT, str(path), layout, block_size, None))
    return _merged(schemes) if schemes else None


def quantization_config(config: Mapping[str, object], path: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a config.json, of its text model where only that has one (or an older name)."""
    text = optional(config, "text_config", dict, str(path), _REMEDY) or {}
    for holder in (config, text):
        for key in ("quantization_config", "compression_config"):
            if (data := optional(holder, key, dict, str(path), _REMEDY)) is not None:
                return data
    return None


def declared(directory: Path, config: Mapping[str, object]) -> Mapping[str, object] | None:
    """What a model's files say of its quantization: config.json, or hf_quant_config.json where only that does."""
    data = quantization_config(config, directory / CONFIG)
    path = directory / modelopt.FILE_NAME
    return read_object(path, _REMEDY) if data is None and path.exists() else data


def is_nvfp4(data: Mapping[str, object]) -> bool:
    """Whether a `quantization_config` is for `read_scheme`, be it to read or to refuse it; others are none of ours."""
    return any(known.is_config(data) and known.is_nvfp4(data) for known in FORMATS)


def read_scheme(data: Mapping[str, object], source: str) -> Scheme:
    """What one `quantization_config` says. Raises QuantError for a format that is not read here."""
    for known in FORMATS:
        if known.is_config(data):
            return known.read(data, source)
    method = str(data.get("quant_method"))
    expected = f"expected one of {', '.join(known.name for known in FORMATS)}"
    other = OTHERS.get(method)
    if other is not None and other.volta:
        raise QuantError(
            f"{source}: quant_method: {expected}, got {method!r} ({other.what})",
            "Serve it as it is, the engine knows it; only NVFP4 models are verified and converted",
        )
    described = repr(method) if other is None else f"{method!r} ({other.what}; on a V100: {other.why})"
    raise QuantError(f"{source}: quant_method: {expected}, got {described}", "Choose an NVFP4 version of the model")


def _merged(schemes: list[Scheme]) -> Scheme:
    """The first scheme, completed by the others, which must not contradict it."""
    first = schemes[0]
    for other in schemes[1:]:
        for what, mine, its in (
            ("block size", first.group_size, other.group_size),
            ("tensor names", first.layout.global_scale, other.layout.global_scale),
        ):
            if mine != its:
                raise QuantError(f"{other.source}: {what}: expected {mine} as in {first.source}, got {its}", _REMEDY)
        first = replace(
            first,
            ignore=first.ignore if other.ignore is None else (first.ignore or ()) + other.ignore,
            kv_cache=first.kv_cache or other.kv_cache,
            pre_quant_scale=first.pre_quant_scale or other.pre_quant_scale,
        )
    return first
