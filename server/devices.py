"""The GPUs of this machine, as NVIDIA's management library reports them. Loads no CUDA and works without a driver."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.errors import PreflightError


@dataclass(frozen=True)
class Device:
    """One GPU: `capability` such as "7.0", memory rounded to GiB, and whether any NVLink of it is up."""

    name: str
    uuid: str
    capability: str
    memory_gib: int
    nvlink: bool

    def __str__(self) -> str:
        link = "NVLink" if self.nvlink else "PCIe"
        return f"{self.name} ({self.capability}, {self.memory_gib} GiB, {link})"


@dataclass(frozen=True)
class Devices:
    """The GPUs the engine may use, in order; where there are none, `reason` says why."""

    gpus: tuple[Device, ...]
    reason: str = ""

    def __str__(self) -> str:
        return " + ".join(str(gpu) for gpu in self.gpus) or self.reason


def find_devices(environ: Mapping[str, str] = os.environ) -> Devices:
    """The GPUs that the driver reports and CUDA_VISIBLE_DEVICES leaves visible.

    Raises:
        PreflightError: there is a driver, but it cannot be asked (for example after an upgrade without a reboot).
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Devices((), f"no NVIDIA driver ({error})")
    except pynvml.NVMLError as error:
        raise PreflightError(
            f"the NVIDIA driver cannot be asked for its GPUs: {error}. Does nvidia-smi work?"
        ) from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [_describe(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return Devices((), "the NVIDIA driver reports no GPU")
    visible = select_visible(found, environ.get("CUDA_VISIBLE_DEVICES"))
    return Devices(visible, "" if visible else "CUDA_VISIBLE_DEVICES hides every GPU")


def _describe(handle: object) -> Device:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        capability=f"{major}.{minor}",
        memory_gib=round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        nvlink=_has_nvlink(handle),
    )


def _has_nvlink(handle: object) -> bool:
    import pynvml

    try:
        return any(pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):  # no such link on this GPU
        return False


def select_visible(found: Sequence[Device], visible: str | None) -> tuple[Device, ...]:
    """The devices that CUDA would see: a list of indexes or UUID prefixes that ends at the first invalid entry.

    The rule is CUDA's own (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    if visible is None:
        return tuple(found)
    chosen: list[Device] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(found[int(entry)])
            continue
        named = [device for device in found if entry.startswith("GPU-") and device.uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)
