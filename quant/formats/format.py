"""What a checkpoint format is to the rest of the project. Torch-free.

Each format is one `Format`, in a module of its own. quant/formats/registry.py lists them all. Nothing outside this
folder names a format in order to read, verify, convert or serve it. CONTRIBUTING.md has the steps for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quant.constants import GROUP_SIZES
from quant.formats.scheme import LinearLayout, Scheme

# A parsed JSON object: a `quantization_config`, or a file of the format's own.
Config = Mapping[str, object]


@dataclass(frozen=True)
class Written:
    """What describes a model in some format: config.json's `quantization_config`, and further files by name."""

    quantization_config: dict[str, object]
    files: Mapping[str, dict[str, object]] = field(default_factory=dict)


def _never(_config: Config) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format.

    Identity:
        name: as reports and `convert --format` show it.
        maker: whose format it is, for messages.
        aliases: further values of `--quantization` that mean this format.
    Tensors:
        layout: the names of a quantized linear's tensors.
        runtime_tensors: suffixes of further tensors per linear that the engine needs to compute with it.
    Configs, read:
        files: the format's own files, beside config.json.
        is_config: whether a `quantization_config` is in this format.
        claims: whether a config in this format is for us: to be read, or refused with our reason. Others go to vLLM.
        read: what such a config says; the second argument names it in errors. Raises QuantError.
            None: this format never stands in config.json.
        read_file: the same for one of `files`, with the scheme found before it, if any.
            None: `files` hold what `read` reads.
        ignore_is_exact: the config's `ignore` names every 16-bit linear, and engines rely on it.
            Otherwise the tensors decide which linears are quantized.
    Configs, written:
        write: what describes a model quantized as the scheme says, whose `kept` modules (names) are in 16 bits.
            None: `convert` cannot write this format.
        group_sizes, kv_caches: the values of `Scheme.group_size` and `Scheme.kv_cache` that can be written.
    """

    name: str
    maker: str
    layout: LinearLayout
    aliases: tuple[str, ...] = ()
    runtime_tensors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    is_config: Callable[[Config], bool] = _never
    claims: Callable[[Config], bool] = _never
    read: Callable[[Config, str], Scheme] | None = None
    read_file: Callable[[Path, Scheme | None], Scheme] | None = None
    ignore_is_exact: bool = False
    write: Callable[[Scheme, tuple[str, ...]], Written] | None = None
    group_sizes: tuple[int, ...] = GROUP_SIZES
    kv_caches: tuple[str, ...] = ("", "fp8")
