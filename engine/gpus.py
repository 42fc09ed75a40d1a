"""The GPUs that CUDA shows this process, read through NVML. It makes no CUDA context, so the process can fork."""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from engine.environment import FORCE_VOLTA
from engine.volta import Gpu


def forced(environ: Mapping[str, str]) -> bool:
    """Whether GPUs other than V100s are to be treated as V100s.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = environ.get(FORCE_VOLTA, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{FORCE_VOLTA}: expected 0 or 1, got {value!r}")
    return value == "1"


def kernels_are_for_gpus() -> bool:
    """Whether the installed kernels have code for GPUs (kernels/setup.py), not only for CPUs."""
    try:
        return "cuda" in importlib.metadata.version("voltserve-kernels")
    except importlib.metadata.PackageNotFoundError:
        return False


@cache
def visible() -> tuple[Gpu, ...]:
    """The visible GPUs in CUDA's order; none without a driver."""
    import pynvml

    try:
        with _nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in physical_indexes()]
            return tuple(
                Gpu(index, pynvml.nvmlDeviceGetName(handle), tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
                for index, handle in enumerate(handles)
            )
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()


@cache
def physical_indexes() -> tuple[int, ...]:
    """NVML's index of each visible GPU."""
    import pynvml

    with _nvml():
        count = pynvml.nvmlDeviceGetCount()
        uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    return select(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def select(uuids: Sequence[str], entries: str | None) -> tuple[int, ...]:
    """Indexes into `uuids` of the GPUs that CUDA_VISIBLE_DEVICES = `entries` (None: unset) shows.

    Entries are indexes or prefixes of UUIDs. The first invalid entry ends the list (CUDA C++ Programming Guide, "CUDA
    Environment Variables").
    """
    if entries is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in entries.split(",")):
        if entry.isdigit():
            named = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
