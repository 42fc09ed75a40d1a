"""Memory and temperature of the engine's GPUs now, for `/health`, `/metrics` and the status page."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.config.devices import Device
from server.doctor.nvml import THROTTLE_REASONS, ask

# Metric after `voltserve_gpu_`, its meaning, and the reading's field.
FIGURES = (
    ("memory_used_bytes", "GPU memory in use", "memory_used"),
    ("memory_total_bytes", "GPU memory", "memory_total"),
    ("temperature_celsius", "GPU temperature", "temperature"),
    ("ecc_uncorrected_errors", "Uncorrected memory errors since the driver was loaded", "ecc_errors"),
)
KEPT_FOR = 1.0  # seconds; the driver has nothing new sooner

log = structlog.get_logger("voltserve.gateway")


@dataclass(frozen=True)
class Reading:
    """One GPU now: bytes, and °C where the card reports it. `index` counts the engine's GPUs, after `replica/` where
    engines are on several machines. `throttle`: what slows it (server/doctor/nvml.py). `problem`: why it cannot be
    read, of a card that is lost; nothing else is known then.
    """

    index: int | str
    name: str
    memory_used: int | None
    memory_total: int | None
    temperature: int | None
    ecc_errors: int | None = None
    throttle: tuple[str, ...] = ()
    problem: str = ""


class GpuMeter:
    """Reads the given GPUs through NVML. Without GPUs, NVML is never loaded."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._asked = False
        self._readings: list[Reading] = []
        self._read_at = float("-inf")

    def read(self) -> list[Reading]:
        """The GPUs, those that cannot be read with the reason; the log has it, too."""
        if self._devices and time.monotonic() - self._read_at > KEPT_FOR:
            self._read_at = time.monotonic()
            self._readings = self._ask()
        return self._readings

    def _ask(self) -> list[Reading]:
        import pynvml

        try:
            if not self._asked:
                pynvml.nvmlInit()
                self._asked = True
        except pynvml.NVMLError as error:
            log.warning("the GPUs cannot be read", error=str(error))
            return [_lost(index, device, error) for index, device in enumerate(self._devices)]
        readings = []
        failed = False
        for index, device in enumerate(self._devices):
            try:
                readings.append(_reading(index, device.name, pynvml.nvmlDeviceGetHandleByUUID(device.uuid)))
            except pynvml.NVMLError as error:
                failed = True
                log.warning("a GPU cannot be read", gpu=index, name=device.name, error=str(error))
                readings.append(_lost(index, device, error))
        if failed:  # a driver that was reloaded needs a new nvmlInit
            self._asked = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        return readings


class GpuFigures(Collector):
    """What `read` says of GPUs, for Prometheus."""

    def __init__(self, read: Callable[[], list[Reading]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Prometheus gauges."""
        readings = self._read()
        for name, meaning, field in FIGURES:
            family = GaugeMetricFamily(f"voltserve_gpu_{name}", meaning, labels=["gpu"])
            for one in readings:
                value = getattr(one, field)
                if value is not None:
                    family.add_metric([str(one.index)], value)
            yield family
        up = GaugeMetricFamily("voltserve_gpu_up", "1 for a GPU that answers, 0 for one that is lost", labels=["gpu"])
        slow = GaugeMetricFamily(
            "voltserve_gpu_throttled", "1 for each reason that slows a GPU now, 0 for others", labels=["gpu", "reason"]
        )
        for one in readings:
            up.add_metric([str(one.index)], 0 if one.problem else 1)
            for reason in THROTTLE_REASONS.values() if not one.problem else ():
                slow.add_metric([str(one.index), reason], reason in one.throttle)
        yield from (up, slow)


def _lost(index: int, device: Device, error: Exception) -> Reading:
    return Reading(index, device.name, None, None, None, problem=str(error))


def _reading(index: int, name: str, handle: Any) -> Reading:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return Reading(
        index,
        name,
        memory.used,
        memory.total,
        ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        # Uncorrected (1), since the driver was loaded (0).
        ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
        tuple(reason for bit, reason in THROTTLE_REASONS.items() if reasons & bit),
    )
