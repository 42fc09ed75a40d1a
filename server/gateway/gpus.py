"""Memory and temperature of the engine's GPUs now, for `/health`, `/metrics` and the status page."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.devices import Device

# Metric after `voltserve_gpu_`, its meaning, and the reading's field.
FIGURES = (
    ("memory_used_bytes", "GPU memory in use", "memory_used"),
    ("memory_total_bytes", "GPU memory", "memory_total"),
    ("temperature_celsius", "GPU temperature", "temperature"),
)
KEPT_FOR = 1.0  # seconds; asking the driver again sooner tells nothing new

log = structlog.get_logger("voltserve.gateway")


@dataclass(frozen=True)
class Reading:
    """One GPU now: bytes, and °C where the card tells. `index` counts the engine's GPUs, after `replica/` where
    engines are on several machines.
    """

    index: int | str
    name: str
    memory_used: int
    memory_total: int
    temperature: int | None


class GpuMeter:
    """Reads the given GPUs through NVML. Without GPUs, NVML is never loaded."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._handles: list[Any] | None = None
        self._readings: list[Reading] = []
        self._read_at = float("-inf")

    def read(self) -> list[Reading]:
        """The GPUs; none while the driver cannot be asked, which the log says."""
        if self._devices and time.monotonic() - self._read_at > KEPT_FOR:
            self._read_at = time.monotonic()
            self._readings = self._ask()
        return self._readings

    def _ask(self) -> list[Reading]:
        import pynvml

        try:
            if self._handles is None:
                pynvml.nvmlInit()
                self._handles = [pynvml.nvmlDeviceGetHandleByUUID(device.uuid) for device in self._devices]
            return [
                _reading(index, device.name, handle)
                for index, (device, handle) in enumerate(zip(self._devices, self._handles, strict=True))
            ]
        except pynvml.NVMLError as error:
            log.warning("the GPUs cannot be read", error=str(error))
            self._handles = None
            return []


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


def _reading(index: int, name: str, handle: Any) -> Reading:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        temperature = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except pynvml.NVMLError_NotSupported:
        temperature = None
    return Reading(index, name, memory.used, memory.total, temperature)
