"""Quantizes a 16-bit checkpoint to NVFP4: compressed-tensors files plus quantize_config.json.

Before the first pass, memory, disk and time are estimated (quant/estimate.py). Then the source is read three times:

1. Scan. Finds the largest magnitude of every linear, so that fused layers share a global scale even across shards.
   NaN and Inf are found here, before anything is written.
2. Quantize. One linear per core. Each result is kept on disk, so that a stopped run resumes.
3. Write. Kept results and 16-bit tensors go into shards, cut as the source's are.

A method that calibrates runs the 16-bit model between scan and quantize (quant/calibrate.py). Only that step needs the
whole model in memory. The others hold one tensor and its result per core.
"""

import importlib.metadata
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from quant import model_card
from quant.atomic import atomic_directory
from quant.blockwise import largest_magnitude, quantize_matrix
from quant.calibrate import CalibrationSettings, calibrate, lane_names
from quant.constants import CONFIG, DEFAULT_GROUP_SIZE, INDEX_NAME
from quant.errors import QuantError
from quant.formats import compressed_tensors, quantize_config
from quant.jsonfile import write_object
from quant.methods import DEFAULT_METHOD, Method
from quant.parallel import map_single_threaded
from quant.partial import PartialResults, partial_results
from quant.progress import OnProgress, Progress, ignore_progress
from quant.safetensors_file import Checkpoint, ShardWriter, TensorInfo, write_index
from quant.selection import DEFAULT_IGNORE, Selection, matching_pattern, siblings
from quant.task import Task, prepare

# Files beside the weights: tokenizer, template, generation settings, remote code, licence. A README is not copied: it
# is the source's model card, and quant/model_card.py writes a new one.
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
    """What was done. `kept` maps a tensor's name to the reason it stayed in 16 bits. Sizes are bytes of tensor data."""

    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    source_bytes: int
    output_bytes: int


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    method: Method = DEFAULT_METHOD,
    calibration: CalibrationSettings | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    on_progress: OnProgress = ignore_progress,
) -> QuantizeReport:
    """Quantizes the model directory `src` (float16, bfloat16 or float32 safetensors) into the new directory `dst`.

    `ignore` is in compressed-tensors' syntax (quant/selection.py). Kept tensors stay float16 or bfloat16; float32
    becomes float16. `calibration` is for methods that calibrate; None means the default text.

    Raises QuantError, and leaves nothing behind, for:
    - a source that is not a 16-bit model, or layers that no engine here serves in 4 bits;
    - a weight that is NaN or Inf, or does not fit float16;
    - too little memory or disk, and an existing `dst`.
    After any other interruption, such as Ctrl-C, the results so far are kept for the next run.
    """
    task = prepare(src, method=method, calibration=calibration, group_size=group_size, ignore=ignore)
    return run(task, dst, on_progress)


def run(task: Task, dst: Path, on_progress: OnProgress = ignore_progress) -> QuantizeReport:
    """Does the task. Raises QuantError as `quantize_checkpoint` says."""
    checkpoint, selection, method, calibration = task.checkpoint, task.selection, task.method, task.calibration
    group_size = task.group_size
    task.estimate.refuse_what_does_not_fit(checkpoint.directory, dst)
    inputs = _inputs(checkpoint, selection, method, calibration, group_size)
    with atomic_directory(dst) as out, ExitStack() as stack:
        amax = _largest_magnitudes(checkpoint, selection, on_progress)
        done = stack.enter_context(partial_results(dst, inputs))
        if calibration is not None:
            _calibrate(checkpoint, selection, method, calibration, done, on_progress)
        _quantize(checkpoint, selection, amax, method, group_size, done, on_progress)
        written = _write_shards(checkpoint, selection, out, group_size, done, on_progress)
        if (checkpoint.directory / INDEX_NAME).exists():
            write_index(out, written)
        copy_files(checkpoint.directory, out, without=(CONFIG, *model_card.readmes(checkpoint.directory)))
        # Linears whose K does not fit match no pattern, so the config lists them by name.
        modules = [name.removesuffix(".weight") for name in selection.kept if name.endswith(".weight")]
        misfits = tuple(
            module
            for module in modules
            if len(checkpoint.tensors[f"{module}.weight"].shape) == 2 and not matching_pattern(module, task.ignore)
        )
        quantization = compressed_tensors.write_config(group_size, task.ignore + misfits)
        write_object(out / CONFIG, {**task.config, "quantization_config": quantization})
        record = _record(task)
        quantize_config.write(out, record)
        report = QuantizeReport(
            selection.linears,
            selection.kept,
            sum(info.nbytes for info in checkpoint.tensors.values()),
            sum(info.nbytes for info in written.values()),
        )
        figures = model_card.Figures(len(report.quantized), len(report.kept), report.source_bytes, report.output_bytes)
        text = calibration.text.source if calibration else ""
        model_card.write(checkpoint.directory, out, record, figures, text)
    return report


def _record(task: Task) -> quantize_config.QuantizeConfig:
    """How the result was made, for its quantize_config.json."""
    record = quantize_config.QuantizeConfig(
        task.group_size,
        task.method.name,
        source=model_card.model_name(task.checkpoint.directory),
        voltserve_version=importlib.metadata.version("voltserve"),
    )
    if task.calibration is None:
        return record
    return replace(
        record,
        calibration_sha256=task.calibration.text.sha256,
        calibration_windows=task.calibration.windows,
        calibration_window_tokens=task.calibration.window_tokens,
        calibration_seed=task.calibration.seed,
    )


def _inputs(
    checkpoint: Checkpoint,
    selection: Selection,
    method: Method,
    calibration: CalibrationSettings | None,
    group_size: int,
) -> dict[str, object]:
    """Everything a linear's result depends on. A file with the same size and modification time counts as unchanged."""
    stats = {shard: (checkpoint.directory / shard).stat() for shard in checkpoint.shards}
    return {
        "source": str(checkpoint.directory.resolve()),
        "shards": {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in stats.items()},
        "linears": list(selection.linears),
        "method": asdict(method),
        "calibration": calibration and {**asdict(calibration), "text": calibration.text.sha256},
        "block_size": group_size,
    }


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


_CALIBRATION = "calibration"


def _calibrate(
    checkpoint: Checkpoint,
    selection: Selection,
    method: Method,
    calibration: CalibrationSettings,
    done: PartialResults,
    on_progress: OnProgress,
) -> None:
    if _CALIBRATION in done:
        return
    sums = calibrate(
        checkpoint.directory,
        selection.linears,
        calibration,
        gradients=method.policy == "quasar",
        diagonal=not method.compensate,
        kept=done,
        on_progress=on_progress,
    )
    done.save(_CALIBRATION, sums)
    for name in lane_names():
        done.remove(name)


def _quantize(
    checkpoint: Checkpoint,
    selection: Selection,
    amax: Mapping[str, float],
    method: Method,
    group_size: int,
    done: PartialResults,
    on_progress: OnProgress,
) -> None:
    """Quantizes every linear, and keeps its tensors in `done`, keyed by suffix."""
    total = sum(checkpoint.tensors[f"{module}.weight"].nbytes for module in selection.linears)
    finished = 0
    lock = threading.Lock()

    def work(module: str) -> None:
        nonlocal finished
        name = f"{module}.weight"
        info = checkpoint.tensors[name]
        if module not in done:
            (_, weight), *_ = checkpoint.read(info.shard, [name])
            sums = done.load_one(_CALIBRATION, module) if method.calibrates else None
            quantized = quantize_matrix(
                weight,
                policy=method.policy,
                group_size=group_size,
                amax=amax[module],
                saliency=None if method.compensate else sums,
                hessian=sums if method.compensate else None,
                name=f"{checkpoint.directory / info.shard}: {name}",
            )
            done.save(module, compressed_tensors.write_linear(quantized, module))
        with lock:
            finished += info.nbytes
            on_progress(Progress("quantizing", finished, total, "bytes"))

    # The largest first, so that the last one to finish is small.
    map_single_threaded(work, sorted(selection.linears, key=lambda name: -checkpoint.tensors[f"{name}.weight"].nbytes))


def _write_shards(
    checkpoint: Checkpoint,
    selection: Selection,
    out: Path,
    group_size: int,
    done: PartialResults,
    on_progress: OnProgress,
) -> dict[str, TensorInfo]:
    written: dict[str, TensorInfo] = {}
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    progress = 0
    for shard in checkpoint.shards:
        names = checkpoint.names(shard)
        planned: dict[str, TensorInfo] = {}
        for name in names:
            planned |= _plan(name, checkpoint.tensors[name], group_size, quantized=name not in selection.kept)
        with ShardWriter(out / shard, {name: (info.dtype, info.shape) for name, info in planned.items()}) as writer:
            for name in names:
                if name in selection.kept:
                    (_, tensor), *_ = checkpoint.read(shard, [name])
                    writer.write(name, _to_16_bits(tensor, f"{checkpoint.directory / shard}: {name}"))
                else:
                    module = name.removesuffix(".weight")
                    for suffix, part in done.load(module).items():
                        writer.write(f"{module}.{suffix}", part)
                progress += checkpoint.tensors[name].nbytes
                on_progress(Progress("writing", progress, total, "bytes"))
        written |= planned
    return written


def _plan(name: str, info: TensorInfo, group_size: int, *, quantized: bool) -> dict[str, TensorInfo]:
    """The output tensors that the source's tensor `name` becomes."""
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


def copy_files(src: Path, out: Path, *, without: tuple[str, ...] = (CONFIG,)) -> None:
    """Copies the files beside the weights: tokenizer, settings, licence. Skips the weights' index and `without`."""
    for path in src.iterdir():
        skipped = path.name in without or path.name.startswith(".") or path.name.endswith(".index.json")
        if path.is_file() and not skipped and any(path.match(pattern) for pattern in COPIED):
            shutil.copyfile(path, out / path.name)
