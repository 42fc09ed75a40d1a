"""Derives a plan's inputs from the merged configuration: the device, the run, and the split over GPUs."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from server.config.cards import smallest_card
from server.config.flags import FlagValue
from server.config.presets import Preset
from server.config.settings import Config
from server.plan.cache import CPU_BLOCK, GPU_BLOCK
from server.plan.memory import Device, Run
from server.plan.model import Model
from server.plan.weights import Split, WeightForm
from server.units import GIB

# Of a card's nominal size, what CUDA reports: 16160 of 16384 MiB on a V100 16 GB; a 32 GB one reports a little more.
VISIBLE_SHARE = 16160 / 16384
LARGE_CARD = 70 * GIB  # from here on vLLM batches 8192 tokens by default, below 2048

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2}


def device_of(config: Config, preset: Preset) -> Device:
    """The smallest card that is used; the preset's where the machine has none; without GPUs the available memory."""
    nominal = smallest_card(config.devices, preset, config.gpus_needed)
    if nominal is None:
        return Device("cpu", available_memory(Path("/proc/meminfo").read_text(encoding="ascii")))
    return Device("gpu", int(nominal * GIB * VISIBLE_SHARE))


def available_memory(meminfo: str) -> int:
    """Bytes that new programs may take, from the text of /proc/meminfo (proc(5): MemAvailable, in KiB)."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError("/proc/meminfo: expected a line MemAvailable, got none")


def split_of(engine: Mapping[str, FlagValue]) -> Split:
    """The split that the flags ask for."""
    return Split(_number(engine, "tensor-parallel-size", 1), _number(engine, "pipeline-parallel-size", 1))


def run_of(config: Config, model: Model, device: Device, split: Split) -> Run:
    """How the engine will run, with vLLM's defaults where there is no flag."""
    engine = config.engine
    on_gpu = device.kind == "gpu"
    dtype_bytes = _DTYPE_BYTES[str(engine.get("dtype", "auto"))]
    kv_dtype = str(engine.get("kv-cache-dtype", "auto"))
    form = weight_form(on_gpu=on_gpu)
    length = engine.get("max-model-len", model.positions)
    world = 1 if on_gpu else split.gpus
    usual = 8192 if on_gpu and device.memory_bytes >= LARGE_CARD else 2048 * world
    batched = _number(engine, "max-num-batched-tokens", usual)
    cache_bytes = _number(engine, "kv-cache-memory-bytes", 0)
    if not on_gpu:
        cache_bytes = int(config.env.get("VLLM_CPU_KVCACHE_SPACE", "0")) * GIB or device.memory_bytes // 2
    return Run(
        length=0 if length == "auto" else int(str(length)),
        sequences=_number(engine, "max-num-seqs", 256 if on_gpu else 128 * world),
        batched=batched,
        in_flight=batched * _steps_at_once(engine, split, on_gpu=on_gpu),
        utilization=float(str(engine.get("gpu-memory-utilization", 0.9))),
        dtype_bytes=dtype_bytes,
        # engine/cpu/layers.py keeps them as stored, in models that have quantized layers.
        embedding_bytes=2 if not on_gpu and form == "packed" and model.linears else dtype_bytes,
        cache_dtype_bytes=1 if on_gpu and kv_dtype.startswith("fp8") else dtype_bytes,
        form=form,
        block_size=_number(engine, "block-size", GPU_BLOCK if on_gpu else CPU_BLOCK),
        cache_bytes=cache_bytes,
        keeps_prefixes=engine.get("enable-prefix-caching", True) is not False,
    )


def _steps_at_once(engine: Mapping[str, FlagValue], split: Split, *, on_gpu: bool) -> int:
    """Steps that vLLM schedules before the first has ended (VllmConfig.max_concurrent_batches).

    A pipeline has one per stage. Else the next step is scheduled while the GPU computes, unless that is switched off.
    """
    ahead = on_gpu and split.pipeline == 1 and engine.get("async-scheduling", True) is not False
    return 2 if ahead else split.pipeline


def weight_form(*, on_gpu: bool) -> WeightForm:
    """4 bits wherever the kernels are; a plan for GPUs on a machine without them assumes that they are there."""
    return "packed" if on_gpu or importlib.util.find_spec("voltserve_kernels") is not None else "dense"


def _number(engine: Mapping[str, FlagValue], name: str, default: int) -> int:
    return int(str(engine.get(name, default)))
