"""The GPUs of this machine, as NVIDIA's management library reports them. Loads no CUDA and works without a driver."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.errors import PreflightError

V100 = "7.0"  # its CUDA compute capability


@dataclass(frozen=True)
class Device:
    """One GPU: `capability` such as "7.0", memory rounded to GiB, and whether any NVLink of it is up."""

    name: str
    uuid: str
    capability: str
    memory_gib: int
    nvlink: bool
    index: int = 0  # NVML's, as nvidia-smi shows it

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
        PreflightError: there is a driver, but it cannot be asked (for example after an upgrade without a reboot, or as
            a card is lost); or CUDA_VISIBLE_DEVICES names what is not there.
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
        found = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise PreflightError(
            f"the NVIDIA driver does not answer for one of its GPUs: {error}. `voltserve doctor` and `dmesg | grep -i "
            "xid` say more"
        ) from error
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return Devices((), "the NVIDIA driver reports no GPU")
    visible = select_visible(found, environ.get("CUDA_VISIBLE_DEVICES"))
    return Devices(visible, "" if visible else "CUDA_VISIBLE_DEVICES hides every GPU")


def _describe(index: int) -> Device:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        capability=f"{major}.{minor}",
        memory_gib=round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        nvlink=_has_nvlink(handle),
        index=index,
    )


def _has_nvlink(handle: object) -> bool:
    import pynvml

    try:
        return any(pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):  # no such link on this GPU
        return False


# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
HIDES_ALL = ("", "-1", "void", "none", "nodevfiles")


def select_visible(found: Sequence[Device], visible: str | None) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order: indexes as nvidia-smi counts, or UUID prefixes.

    CUDA itself ends the list at the first unknown entry, and so would start with the wrong cards.

    Raises:
        PreflightError: an entry names no GPU, several, or one twice.
    """
    if visible is None:
        return tuple(found)
    if visible.strip().lower() in HIDES_ALL:
        return ()
    chosen: list[Device] = []
    for entry in (part.strip() for part in visible.split(",")):
        named = [device for device in found if _names(entry, device)]
        if len(named) != 1 or named[0] in chosen:
            raise PreflightError(_not_visible(visible, entry, found, len(named)))
        chosen += named
    return tuple(chosen)


def _names(entry: str, device: Device) -> bool:
    return device.index == int(entry) if entry.isdecimal() else bool(entry) and device.uuid.startswith(entry)


def _not_visible(visible: str, entry: str, found: Sequence[Device], named: int) -> str:
    if entry.startswith("MIG-"):
        got = f"{entry}, a slice of a GPU (MIG): V100s have none, and engines here take whole GPUs"
    elif named > 1:
        got = f"{entry!r}, which {named} GPUs' UUIDs begin with"
    elif named:
        got = f"{entry!r} twice, or by its index and its UUID"
    else:
        got = f"{entry!r}, which names none"
    there = ", ".join(f"{device.index} or {device.uuid} ({device.name})" for device in found)
    return (
        f"CUDA_VISIBLE_DEVICES={visible}: expected GPUs by index or UUID, got {got}. There are {there}; unset it to "
        "have the best of them chosen"
    )


def cards_for(found: Sequence[Device], capability: str, memory_gib: int, nvlink: bool | None) -> list[Device]:
    """The devices that suit a preset, exact matches first.

    Links matter only to a preset for NVLink. Where no device has the capability, the user wants to try others, so all
    are taken.
    """
    able = [device for device in found if device.capability == capability]
    if not able:
        return list(found)
    exact = [device for device in able if device.memory_gib == memory_gib and nvlink in (None, device.nvlink)]
    linked = [device for device in able if device.memory_gib == memory_gib and device not in exact]
    return exact + linked + [device for device in able if device.memory_gib != memory_gib]
