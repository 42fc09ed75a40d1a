"""Reads driver and GPUs from NVIDIA's management library, as plain values. Loads no CUDA."""

from dataclasses import dataclass
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean a slower card, by our name for them (nvml.h).
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# nvmlGpuTopologyLevel_t: how far apart two GPUs' PCIe paths meet.
TOPOLOGY = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one CPU",
    50: "two CPUs",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU. None where the card or driver does not report a value. Sizes in bytes, temperature in °C.

    `ecc_errors`: uncorrected since the driver was loaded, and ever; `retired`: pages retired for two-bit errors, and
    whether some wait for a reboot. `pcie_*`: now, and at most. `peers`: the PCI addresses at the other ends of its
    active NVLinks, one per link. `processes`: (pid, bytes) of each process that computes on it. `slowdown`: °C at which
    the card slows itself down. `fans`: 0 on a passive card. `power`: its limit now and by default, in watts. `bar1`:
    bytes of its memory that other devices can reach. `busy`: whether it has just computed.
    """

    index: int
    name: str
    uuid: str
    pci: str
    capability: str
    memory_total: int
    memory_used: int
    temperature: int | None
    throttle: tuple[str, ...]
    ecc: bool | None
    ecc_errors: tuple[int, int] | None
    retired: tuple[int, bool] | None
    pcie_width: tuple[int, int] | None
    pcie_generation: tuple[int, int] | None
    peers: tuple[str, ...]
    processes: tuple[tuple[int, int], ...]
    slowdown: int | None = None
    fans: int | None = None
    persistence: bool | None = None
    power: tuple[float, float] | None = None
    bar1: int | None = None
    busy: bool = False


@dataclass(frozen=True)
class Pair:
    """Two GPUs by index: where their PCIe paths meet, whether NVLink joins them, and whether the driver allows P2P."""

    first: int
    second: int
    meet: str
    nvlink: bool
    peer_access: bool | None


@dataclass(frozen=True)
class Reading:
    """Everything; `cuda` such as "12.8". Where the driver is `absent` or does not answer, `problem` says so."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    problem: str = ""
    absent: bool = False


def read(nvml: Any = None) -> Reading:
    """Asks the library. `nvml` has pynvml's functions; pynvml itself by default."""
    import pynvml

    library = pynvml if nvml is None else nvml
    try:
        library.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Reading(problem=str(error), absent=True)
    except pynvml.NVMLError as error:
        return Reading(problem=str(error))
    try:
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(library, index, handle) for index, handle in enumerate(handles))
        pairs = tuple(
            _pair(library, (gpus[first], handles[first]), (gpus[second], handles[second]))
            for first in range(len(gpus))
            for second in range(first + 1, len(gpus))
        )
        cuda = library.nvmlSystemGetCudaDriverVersion_v2()
        version = f"{cuda // 1000}.{cuda % 1000 // 10}"
        return Reading(library.nvmlSystemGetDriverVersion(), version, gpus, pairs)
    except pynvml.NVMLError as error:  # a GPU that fell off the bus while it was asked
        return Reading(problem=str(error))
    finally:
        library.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    ecc = ask(nvml.nvmlDeviceGetEccMode, handle)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        pci=str(nvml.nvmlDeviceGetPciInfo(handle).busId).lower(),
        capability=f"{major}.{minor}",
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        temperature=ask(nvml.nvmlDeviceGetTemperature, handle, 0),
        throttle=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=_both(nvml.nvmlDeviceGetTotalEccErrors, (handle, 1, 0), (handle, 1, 1)),
        retired=_retired(nvml, handle),
        pcie_width=_both(nvml.nvmlDeviceGetCurrPcieLinkWidth, (handle,), (handle,), nvml.nvmlDeviceGetMaxPcieLinkWidth),
        pcie_generation=_both(
            nvml.nvmlDeviceGetCurrPcieLinkGeneration, (handle,), (handle,), nvml.nvmlDeviceGetMaxPcieLinkGeneration
        ),
        peers=_peers(nvml, handle),
        processes=tuple(
            (int(process.pid), int(process.usedGpuMemory or 0))
            for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        ),
        slowdown=ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, 1),  # 1: NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        fans=ask(nvml.nvmlDeviceGetNumFans, handle),
        persistence=_true(ask(nvml.nvmlDeviceGetPersistenceMode, handle)),
        power=_watts(nvml, handle),
        bar1=_size(ask(nvml.nvmlDeviceGetBAR1MemoryInfo, handle)),
        busy=_is_busy(ask(nvml.nvmlDeviceGetUtilizationRates, handle)),
    )


def _true(answer: int | None) -> bool | None:
    return None if answer is None else bool(answer)


def _size(bar1: Any) -> int | None:
    return None if bar1 is None else int(bar1.bar1Total)


def _is_busy(rates: Any) -> bool:
    return rates is not None and int(rates.gpu) > 0


def _watts(nvml: Any, handle: Any) -> tuple[float, float] | None:
    limits = _both(
        nvml.nvmlDeviceGetPowerManagementLimit, (handle,), (handle,), nvml.nvmlDeviceGetPowerManagementDefaultLimit
    )
    return limits and (limits[0] / 1000, limits[1] / 1000)


def _pair(nvml: Any, first: tuple[Gpu, Any], second: tuple[Gpu, Any]) -> Pair:
    level = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first[1], second[1])
    # Reading (0) and writing (1); both must answer 0, NVML_P2P_STATUS_OK.
    access = [ask(nvml.nvmlDeviceGetP2PStatus, first[1], second[1], index) for index in (0, 1)]
    # Either directly, or through an NVSwitch, which is then at the other end of both.
    linked = second[0].pci in first[0].peers or bool(set(first[0].peers) & set(second[0].peers))
    return Pair(
        first[0].index,
        second[0].index,
        TOPOLOGY.get(-1 if level is None else level, "unknown"),
        linked,
        None if None in access else access == [0, 0],
    )


def _peers(nvml: Any, handle: Any) -> tuple[str, ...]:
    peers = []
    for link in range(18):  # NVML_NVLINK_MAX_LINKS; a V100 has 6
        if ask(nvml.nvmlDeviceGetNvLinkState, handle, link):
            remote = ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            peers.append("" if remote is None else str(remote.busId).lower())
    return tuple(peers)


def _retired(nvml: Any, handle: Any) -> tuple[int, bool] | None:
    pages = ask(nvml.nvmlDeviceGetRetiredPages, handle, 1)  # 1: NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
    pending = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return None if pages is None or pending is None else (len(pages), bool(pending))


def _both(function: Any, first: tuple[Any, ...], second: tuple[Any, ...], other: Any = None) -> tuple[int, int] | None:
    """Two answers, or None where either is not given."""
    answers = (ask(function, *first), ask(other or function, *second))
    return None if answers[0] is None or answers[1] is None else (int(answers[0]), int(answers[1]))


def ask(function: Any, *arguments: Any) -> Any:
    """The answer, or None where this card or driver does not have it. A lost GPU or a broken driver is an error."""
    import pynvml

    absent = (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
    )
    try:
        return function(*arguments)
    except absent:
        return None
