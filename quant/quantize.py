"""16-bit checkpoint in, NVFP4 checkpoint out: compressed-tensors files plus quantize_config.json, shard by shard.

Three passes over the source: the first finds every linear's largest magnitude (and NaN or Inf, before anything is
written), so that fused layers can share a global even across shards; the second quantizes, one linear a core, and keeps
each result on disk, so that a run that was stopped resumes; the third writes the shards. Methods that calibrate run the
16-bit model before the second (quant/calibrate.py). But for that, no pass holds more than a tensor a core and its
result. What all of it takes is computed before the first pass (quant/estimate.py).
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

# Tokenizer, template, generation settings, remote code, licence: all that may stand beside the weights, but no weights.
# A README is the source's model card; quant/model_card.py writes the result's own.
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
    method: Method = DEFAULT_METHOD,
    calibration: CalibrationSettings | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    on_progress: OnProgress = ignore_progress,
) -> QuantizeReport:
    """Quantizes the model directory `src` (float16, bfloat16 or float32 safetensors) into the new directory `dst`.

    `ignore` is in compressed-tensors' syntax (quant/selection.py). What is kept stays float16 or bfloat16, float32
    becomes float16. `calibration` is for methods that calibrate; None is the default text. Raises QuantError for a
    source that is no 16-bit model, layers that no engine here serves in 4 bits, a weight that is NaN or Inf or does not
    fit float16, too little memory or disk, and an existing `dst`; nothing is left behind then. Anything else that ends
    it, such as Ctrl-C, leaves what is done for the next run.
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
        # Linears whose K does not fit match none of the patterns, so engines are told their names.
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
    """What the result says of how it was made."""
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
    """All that a linear's result depends on; a file counts as unchanged while its size and time of change are."""
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
    """Keeps in `done` what each linear's tensors will be, keyed by suffix."""
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

    # The largest first: the last to end is then a small one.
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


def copy_files(src: Path, out: Path, *, without: tuple[str, ...] = (CONFIG,)) -> None:
    """Copies what stands beside the weights: tokenizer, settings, licence; not the weights' index, not `without`."""
    for path in src.iterdir():
        skipped = path.name in without or path.name.startswith(".") or path.name.endswith(".index.json")
        if path.is_file() and not skipped and any(path.match(pattern) for pattern in COPIED):
            shutil.copyfile(path, out / path.name)
