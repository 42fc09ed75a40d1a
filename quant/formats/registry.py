"""All checkpoint formats, and what the rest of the project derives from them. Torch-free.

Every function reads `FORMATS` when it is called, so that a test may register a format of its own.
"""

from collections.abc import Iterator, Mapping

from quant.formats import auto_round, compressed_tensors, fp8, modelopt, quantize_config
from quant.formats.format import Format
from quant.formats.scheme import LinearLayout, Scheme

# In the order in which a config is offered to them, and in which their own files are read.
FORMATS: tuple[Format, ...] = (
    compressed_tensors.FORMAT,
    auto_round.FORMAT,
    modelopt.FORMAT,
    fp8.FORMAT,
    quantize_config.FORMAT,
)


def in_config_json() -> tuple[Format, ...]:
    """Formats in which config.json's `quantization_config` may be."""
    return tuple(known for known in FORMATS if known.read is not None)


def targets() -> Mapping[str, Format]:
    """The formats that `convert` writes, by name."""
    return {known.name: known for known in FORMATS if known.write is not None}


def engine_names() -> tuple[str, ...]:
    """Values of `--quantization` with which a checkpoint in a format of ours is ours."""
    return tuple(name for known in FORMATS for name in (known.name, *known.aliases))


def layouts() -> tuple[LinearLayout, ...]:
    """The layouts of all formats, each once."""
    return tuple(dict.fromkeys(known.layout for known in FORMATS))


def own_files() -> Iterator[tuple[Format, str]]:
    """Every file name of a format's own, with the format."""
    return ((known, name) for known in FORMATS for name in known.files)


def ignore_is_exact(scheme: Scheme) -> bool:
    """Whether `scheme.ignore` names every 16-bit linear, so that engines rely on it."""
    return not scheme.by_tensors and any(known.ignore_is_exact for known in FORMATS if known.name == scheme.format)
