"""Converts one NVFP4 format to another, shard by shard, with at most one tensor in memory.

Codes and block scales are the same bytes in all safetensors formats, so they are copied. Only global scales may change:
a multiplier becomes a divisor with that multiplier as its float32 reciprocal, and the other way round. The result reads
as the same values, -0 included. If a format cannot hold them, the conversion is refused and nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quant.atomic import atomic_directory
from quant.constants import CONFIG, INDEX_NAME
from quant.errors import QuantError
from quant.formats import gguf_nvfp4, modelopt, registry
from quant.formats.detect import CONFIG_KEYS
from quant.formats.format import Format
from quant.formats.linear import exact_reciprocal, is_all_zero
from quant.formats.scheme import LinearLayout, Scheme
from quant.gguf_convert import convert_gguf
from quant.gguf_file import open_gguf
from quant.jsonfile import write_object
from quant.model_config import read_model_config
from quant.progress import OnProgress, Progress, ignore_progress
from quant.quantize import copy_files
from quant.safetensors_file import Checkpoint, ShardWriter, TensorInfo, open_checkpoint, write_index
from quant.verify import Report, verify
from quant.verify.servable import SERVING_ONLY

_LISTED = 3


@dataclass(frozen=True)
class ConvertReport:
    """What was done. `rounded`: tensors whose values the format cannot hold, stored as the nearest that it can."""

    source_format: str
    linears: int
    rounded: tuple[str, ...]
    bytes: int


def convert_checkpoint(
    src: Path, dst: Path, target: str, *, nearest: bool = False, on_progress: OnProgress = ignore_progress
) -> ConvertReport:
    """Converts the NVFP4 model `src` into the new directory `dst` in the format `target`, a name of `registry.targets`.

    `src` is a directory, or a Llama-like GGUF file with NVFP4 tensors. Other tensors of a GGUF file become float16.

    `nearest` rounds a global scale that the format cannot hold to the nearest one that it can. The error is at most one
    unit in the last place of a float32, 1.2e-7 of the value. Without it, such a scale is refused.

    Raises QuantError, and leaves nothing behind, in three cases: `voltserve verify --headers` finds an error in the
    source, the target cannot hold it, or `dst` exists.
    """
    targets = registry.targets()
    if target not in targets:
        raise QuantError(f"format: expected one of {', '.join(targets)}, got {target!r}", "Choose one of these")
    if src.suffix == ".gguf":
        return _convert_gguf(src, dst, target)
    report = verify(src, "headers")
    for finding in report.findings:
        if finding.severity == "error" and finding.check not in SERVING_ONLY:
            raise QuantError(f"{src}: {finding}", "See `voltserve verify`")
    if report.scheme is None:
        raise QuantError(f"{src}: expected an NVFP4 model, got a 16-bit one", "Use `voltserve quantize`")
    _refuse_what_cannot_be_held(report, report.scheme, targets[target])
    checkpoint = open_checkpoint(src)
    scales, rounded = _convert_scales(checkpoint, report, targets[target].layout)
    if rounded and not nearest:
        raise QuantError(
            f"{src}: expected scales that {target} can hold exactly, got {len(rounded)} of {len(scales)} that it "
            f"cannot, as no float32 divisor has them as its reciprocal: {', '.join(rounded[:_LISTED])}",
            "Allow the nearest divisors with --nearest (off by at most 1.2e-7 of the value)",
        )
    with atomic_directory(dst) as out:
        written = _write_shards(checkpoint, report, scales, targets[target].layout, out, on_progress)
        if (src / INDEX_NAME).exists():
            write_index(out, written)
        copy_files(src, out, without=(CONFIG, *(name for _, name in registry.own_files())))
        _write_configs(src, out, report, report.scheme, targets[target])
    total = sum(info.nbytes for info in written.values())
    return ConvertReport(report.scheme.format, len(report.modules.nvfp4), tuple(rounded), total)


def _convert_gguf(src: Path, dst: Path, target: str) -> ConvertReport:
    """A Llama-like GGUF file with NVFP4 linears. ModelOpt's format holds its multipliers exactly."""
    if target != modelopt.NAME:
        remedy = f"Convert it to {modelopt.NAME}, and that to {target}"
        raise QuantError(f"{src}: expected {modelopt.NAME} as the format for a GGUF file, got {target!r}", remedy)
    if not any(tensor.type == gguf_nvfp4.TENSOR_TYPE for tensor in open_gguf(src).tensors.values()):
        raise QuantError(f"{src}: expected NVFP4 tensors (type 40), got none", "Start from the 16-bit model")
    with atomic_directory(dst) as out:
        convert_gguf(src, out)
        report = verify(out, "headers")
    size = sum(tensor.entry.end - tensor.entry.start for tensor in report.tensors.values())
    return ConvertReport("gguf", len(report.modules.nvfp4), (), size)


def _refuse_what_cannot_be_held(report: Report, scheme: Scheme, target: Format) -> None:
    scaled = report.modules.pre_quant_scales
    holders = " and ".join(
        f"{known.maker}'s" for known in registry.FORMATS if modelopt.PRE_QUANT_SCALE in known.runtime_tensors
    )
    sizes = " or ".join(map(str, target.group_sizes))
    eights = report.modules.fp8
    for impossible, what, why in (
        (eights, f"{len(eights)} FP8 linears", "converting copies NVFP4 linears only"),
        (
            scaled and modelopt.PRE_QUANT_SCALE not in target.runtime_tensors,
            f"{len(scaled)} layers with a pre_quant_scale (NVFP4_AWQ)",
            f"only {holders} format has a place for it, and multiplying it into 4-bit weights would round them",
        ),
        (
            scheme.group_size not in target.group_sizes,
            f"block size {scheme.group_size}",
            f"{target.maker}'s NVFP4 has {sizes} weights per block scale",
        ),
        (
            scheme.kv_cache not in target.kv_caches,
            f"a {scheme.kv_cache} key/value cache",
            f"{target.name} cannot say so",
        ),
    ):
        if impossible:
            raise QuantError(
                f"{report.directory}: expected what {target.name} can hold, got {what}: {why}", "Keep the format"
            )


def _convert_scales(
    checkpoint: Checkpoint, report: Report, target: LinearLayout
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All global and input scales for the target (float32 scalars, by the source's name), and names of rounded ones."""
    scales: dict[str, torch.Tensor] = {}
    rounded: list[str] = []
    for module, (*_, layout) in report.modules.nvfp4.items():
        for suffix in (layout.global_scale, layout.input_scale):
            name = f"{module}.{suffix}"
            if name not in checkpoint.tensors:
                continue
            stored = _read(checkpoint, name).reshape(1)
            if layout.divides == target.divides:
                scales[name] = stored
            elif not (stored.isfinite() & (stored > 0) & (1 / stored).isfinite()):
                if not is_all_zero(*(_read(checkpoint, f"{module}.{part}") for part in (layout.codes, layout.scales))):
                    raise QuantError(f"{name}: expected a positive number, got {float(stored)}", "Verify the model")
                scales[name] = torch.ones(1)
            elif target.divides:
                exact = exact_reciprocal(stored)
                scales[name] = 1 / stored if exact is None else exact
                rounded += [name] if exact is None else []
            else:
                scales[name] = 1 / stored
    return scales, rounded


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    ((_, tensor),) = checkpoint.read(checkpoint.tensors[name].shard, [name])
    return tensor


def _write_shards(
    checkpoint: Checkpoint,
    report: Report,
    scales: Mapping[str, torch.Tensor],
    target: LinearLayout,
    out: Path,
    on_progress: OnProgress,
) -> dict[str, TensorInfo]:
    names = {name: _renamed(name, report, target) for name in checkpoint.tensors}
    shape = (1,) if target.divides else ()
    written: dict[str, TensorInfo] = {}
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    done = 0
    for shard in checkpoint.shards:
        own = checkpoint.names(shard)
        planned = {
            names[name]: TensorInfo(info.dtype, shape if name in scales else info.shape, shard)
            for name, info in ((name, checkpoint.tensors[name]) for name in own)
        }
        with ShardWriter(out / shard, {name: (info.dtype, info.shape) for name, info in planned.items()}) as writer:
            for name, tensor in checkpoint.read(shard, own):
                writer.write(names[name], scales[name].reshape(shape) if name in scales else tensor)
                done += tensor.nbytes
                on_progress(Progress("converting", done, total, "bytes"))
        written |= planned
    return written


def _renamed(name: str, report: Report, target: LinearLayout) -> str:
    """The target's name for a tensor. Parts of quantized linears follow the layout; other names stay."""
    module, _, suffix = name.rpartition(".")
    if module not in report.modules.nvfp4:
        return name
    layout = report.modules.nvfp4[module][3]
    parts = ("codes", "scales", "global_scale", "input_scale")
    renamed = {getattr(layout, part): getattr(target, part) for part in parts}
    return f"{module}.{renamed.get(suffix, suffix)}"


def _write_configs(src: Path, out: Path, report: Report, scheme: Scheme, target: Format) -> None:
    config = read_model_config(src)
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in CONFIG_KEYS:
            holder.pop(key, None)
    # What the tensors show, by name. Every format understands names, and no format understands another's patterns.
    kept = tuple(sorted(module for module, shape in report.modules.plain.items() if len(shape) == 2))
    if target.write is None:
        raise ValueError(f"target: expected a format that is written, got {target.name}")
    written = target.write(scheme, kept)
    config["quantization_config"] = written.quantization_config
    for name, contents in written.files.items():
        write_object(out / name, contents)
    write_object(out / CONFIG, config)
