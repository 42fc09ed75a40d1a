"""Which format a checkpoint is in, by what its files say. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quant.constants import CONFIG
from quant.errors import QuantError
from quant.formats import registry
from quant.formats.others import OTHERS
from quant.formats.scheme import Scheme
from quant.jsonfile import optional, read_object
from quant.model_config import read_model_config

# The keys of config.json under which a format's config stands: today's, and an older name for it.
CONFIG_KEYS = ("quantization_config", "compression_config")
_REMEDY = "Restore the model's files from its source"


def detect(directory: Path) -> Scheme | None:
    """The quantization that the configs in `directory` declare. None if they declare none (a 16-bit model).

    Raises QuantError, with reason and remedy, for a format that is not read here, a malformed config, and configs that
    contradict each other.
    """
    return detect_config(directory, read_model_config(directory))


def detect_config(directory: Path, config: Mapping[str, object]) -> Scheme | None:
    """`detect`, with config.json read already."""
    schemes = []
    if (data := quantization_config(config, directory / CONFIG)) is not None:
        schemes.append(read_scheme(data, f"{directory / CONFIG}: quantization_config"))
    for known, name in registry.own_files():
        path = directory / name
        if not path.exists():
            continue
        if known.read_file is not None:
            schemes.append(known.read_file(path, schemes[0] if schemes else None))
        elif known.read is not None:
            schemes.append(known.read(read_object(path, _REMEDY), str(path)))
    return _merged(schemes) if schemes else None


def quantization_config(config: Mapping[str, object], path: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a config.json, or of its text model if only that has one. Older names count."""
    text = optional(config, "text_config", dict, str(path), _REMEDY) or {}
    for holder in (config, text):
        for key in CONFIG_KEYS:
            if (data := optional(holder, key, dict, str(path), _REMEDY)) is not None:
                return data
    return None


def declared(directory: Path, config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The quantization that a model's files declare: in config.json, otherwise in a format's own file."""
    data = quantization_config(config, directory / CONFIG)
    if data is not None:
        return data
    paths = (directory / name for known, name in registry.own_files() if known.read is not None)
    return next((read_object(path, _REMEDY) for path in paths if path.exists()), None)


def is_ours(data: Mapping[str, object]) -> bool:
    """Whether a `quantization_config` is for `read_scheme`, be it to read or to refuse it: NVFP4, FP8 or both."""
    return any(known.is_config(data) and known.claims(data) for known in registry.FORMATS)


def read_scheme(data: Mapping[str, object], source: str) -> Scheme:
    """The scheme that one `quantization_config` describes. Raises QuantError for a format that is not read here."""
    formats = registry.in_config_json()
    for known in formats:
        if known.read is not None and known.is_config(data):
            return known.read(data, source)
    method = str(data.get("quant_method"))
    expected = f"expected one of {', '.join(known.name for known in formats)}"
    other = OTHERS.get(method)
    described = repr(method) if other is None else f"{method!r} ({other.what})"
    raise QuantError(
        f"{source}: quant_method: {expected}, got {described}", "Choose an NVFP4 or FP8 version of the model"
    )


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
            w8a8=first.w8a8 or other.w8a8,
            elements=tuple(sorted({*first.elements, *other.elements})),
            by_tensors=first.by_tensors or other.by_tensors,
        )
    return first
