"""16-bit checkpoint in, NVFP4 checkpoint out: compressed-tensors files plus quantize_config.json, shard by shard.

Two passes over the source: the first finds every linear's largest magnitude (and NaN or Inf, before anything is
written), so that fused layers can share a global even across shards; the second quantizes and writes. Neither holds
more than one tensor and its result.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quant.atomic import atomic_directory
from quant.blockwise import largest_magnitude, quantize_matrix
from quant.errors import QuantError
from quant.formats import compressed_tensors, quantize_config
from quant.formats.quantize_config import ScalePolicy
from quant.jsonfile import read_object, write_object
from quant.progress import OnProgress, Progress, ignore_progress
from quant.safetensors_file import INDEX_NAME, Checkpoint, ShardWriter, TensorInfo, open_checkpoint, write_index
from quant.selection import DEFAULT_IGNORE, Selection, matching_pattern, select, siblings
from quant.tensor import GROUP_SIZES

# Tokenizer, template, generation settings, remote code, licence: all that may stand beside the weights, but no weights.
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.md", "LICENSE*", "NOTICE*")
_KEPT_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class QuantizeReport:
    """What was done. `kept`: tensor name to the reason it stayed in 16 bits; sizes are of tensor data, in bytes."""

    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    source_bytes: int
    output_bytes: int


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    policy: ScalePolicy = "mse",
    group_size: int = 16,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    on_progress: OnProgress = ignore_progress,
) -> QuantizeReport:
    """Quantizes the model directory `src` (float16, bfloat16 or float32 safetensors) into the new directory `dst`.

    `ignore` is in compressed-tensors' syntax (quant/selection.py). What is kept stays float16 or bfloat16, float32
    becomes float16. Raises QuantError for a source that is no 16-bit model, a weight that is NaN or Inf or does not fit
    float16, and an existing `dst`; nothing is left behind then.
    """
    if policy not in quantize_config.SCALE_POLICIES:
        known = ", ".join(quantize_config.SCALE_POLICIES)
        raise QuantError(f"scale policy: expected one of {known}, got {policy!r}", "Choose one of these")
    if group_size not in GROUP_SIZES:
        raise QuantError(f"block size: expected 16 or 32, got {group_size}", "Choose one of these")
    config = _read_source_config(src)
    checkpoint = open_checkpoint(src)
    _refuse_quantized_tensors(checkpoint)
    selection = select(checkpoint.tensors, group_size, ignore)
    if not selection.linears:
        raise QuantError(
            f"{src}: expected linear layers to quantize, got none", "Check the ignore patterns and the source"
        )
    with atomic_directory(dst) as out:
        amax = _largest_magnitudes(checkpoint, selection, on_progress)
        written = _write_shards(checkpoint, selection, amax, out, policy, group_size, on_progress)
        if (src / INDEX_NAME).exists():
            write_index(out, written)
        _copy_files(src, out)
        # Linears whose K does not fit match none of the patterns, so engines are told their names.
        modules = [name.removesuffix(".weight") for name in selection.kept if name.endswith(".weight")]
        misfits = tuple(
            module
            for module in modules
            if len(checkpoint.tensors[f"{module}.weight"].shape) == 2 and not matching_pattern(module, ignore)
        )
        config["quantization_config"] = compressed_tensors.write_config(group_size, ignore + misfits)
        write_object(out / "config.json", config)
        quantize_config.write(out, quantize_config.QuantizeConfig(group_size, policy))
    return QuantizeReport(
        selection.linears,
        selection.kept,
        sum(info.nbytes for info in checkpoint.tensors.values()),
        sum(info.nbytes for info in written.values()),
    )


def _read_source_config(src: Path) -> dict[str, object]:
    remedy = "Name a model directory with config.json, safetensors shards and tokenizer files"
    if not src.is_dir():
        raise QuantError(f"{src} is not a directory", remedy)
    config = read_object(src / "config.json", remedy)
    for present, where in (
        ("quantization_config" in config, "config.json has a quantization_config"),
        ((src / quantize_config.FILE_NAME).exists(), f"{quantize_config.FILE_NAME} exists"),
        ((src / "hf_quant_config.json").exists(), "hf_quant_config.json exists"),
    ):
        if present:
            raise QuantError(f"{src} is quantized already ({where})", "Start from the 16-bit model")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) == "float32":
            config[key] = "float16"
    return config


def _refuse_quantized_tensors(checkpoint: Checkpoint) -> None:
    for name, info in checkpoint.tensors.items():
        if info.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or name.endswith((".weight_packed", ".qweight")):
            where = checkpoint.directory / info.shard
            raise QuantError(
                f"{where}: {name}: expected 16-bit or 32-bit floats, got quantized {info.dtype}",
                "Start from the 16-bit model",
            )


def _largest_magnitudes(checkpoint: Checkpoint, selection: Selection, on_progress: OnProgress) -> dict[str, float]:
    """Each linear's max|w|, raised to the largest among the layers it is fused with."""
    own: dict[str, float] = {}
    wanted = {f"{module}.weight" for module in selection.linears}
    total = sum(checkpoint.tensors[name].nbytes for name in wanted)
    done = 0
    for shard in checkpoint.shards:
        names = [name for name in checkpoint.names(shard) if name in wanted]
        for name, tensor in checkpoint.read(shard, names):
            own[name.removesuffix(".weight")] = largest_magnitude(tensor, f"{checkpoint.directory / shard}: {name}")
            done += tensor.nbytes
            on_progress(Progress("scanning weights", done, total, "bytes"))
    return {module: max(own.get(sibling, 0.0) for sibling in siblings(module)) for module in own}


def _write_shards(
    checkpoint: Checkpoint,
    selection: Selection,
    amax: Mapping[str, float],
    out: Path,
    policy: ScalePolicy,
    group_size: int,
    on_progress: OnProgress,
) -> dict[str, TensorInfo]:
    written: dict[str, TensorInfo] = {}
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    done = 0
    for shard in checkpoint.shards:
        names = checkpoint.names(shard)
        planned: dict[str, TensorInfo] = {}
        for name in names:
            planned |= _plan(name, checkpoint.tensors[name], group_size, quantized=name not in selection.kept)
        with ShardWriter(out / shard, {name: (info.dtype, info.shape) for name, info in planned.items()}) as writer:
            for name, tensor in checkpoint.read(shard, names):
                module = name.removesuffix(".weight")
                where = f"{checkpoint.directory / shard}: {name}"
                if name in selection.kept:
                    writer.write(name, _to_16_bits(tensor, where))
                else:
                    quantized = quantize_matrix(
                        tensor, policy=policy, group_size=group_size, amax=amax[module], name=where
                    )
                    for suffix, part in compressed_tensors.write_linear(quantized, module).items():
                        writer.write(f"{module}.{suffix}", part)
                done += tensor.nbytes
                on_progress(Progress("quantizing", done, total, "bytes"))
        written |= planned
    return written


def _plan(name: str, info: TensorInfo, group_size: int, *, quantized: bool) -> dict[str, TensorInfo]:
    """What the source's tensor `name` becomes."""
    if not quantized:
        dtype = info.dtype if info.dtype in _KEPT_DTYPES else torch.float16
        return {name: TensorInfo(dtype, info.shape, info.shard)}
    rows, columns = info.shape
    return {
        f"{name.removesuffix('.weight')}.{suffix}": TensorInfo(dtype, shape, info.shard)
        for suffix, dtype, shape in compressed_tensors.layout(rows, columns, group_size)
    }


def _to_16_bits(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.dtype in _KEPT_DTYPES:
        return tensor
    half = tensor.to(torch.float16)
    if bool((half.isinf() & tensor.isfinite()).any()):
        raise QuantError(
            f"{where}: expected values within float16's 65504, got {largest_magnitude(tensor, where)}",
            "Convert the source to bfloat16 first",
        )
    return half


def _copy_files(src: Path, out: Path) -> None:
    for path in src.iterdir():
        skipped = path.name == "config.json" or path.name.startswith(".") or path.name.endswith(".index.json")
        if path.is_file() and not skipped and any(path.match(pattern) for pattern in COPIED):
            shutil.copyfile(path, out / path.name)
