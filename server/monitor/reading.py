"""One reading of a service (`/health`, `/metrics`) and of this machine's GPUs (NVML)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from server.doctor.nvml import THROTTLE_REASONS, ask
from server.scrape import Metrics, ScrapeError, scrape

LIMIT = 2.0  # seconds per question: the view must continue while a server hangs


@dataclass(frozen=True)
class GpuReading:
    """One GPU now: bytes, °C where the card reports it, and the reasons that slow it (server/doctor/nvml.py)."""

    index: int
    name: str
    memory_used: int
    memory_total: int
    temperature: int | None
    throttle: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """Everything at one moment. Where the service does not answer, `health` and `metrics` are empty, `problem` says so.

    `at`: `time.monotonic()` seconds. `gpus_problem`: why there are no GPUs to show.
    """

    at: float
    health: Mapping[str, Any]
    metrics: Metrics
    problem: str
    gpus: tuple[GpuReading, ...]
    gpus_problem: str


class GpuReader:
    """Reads this machine's GPUs; without a driver, never any. `nvml` has pynvml's functions; pynvml by default."""

    def __init__(self, nvml: Any = None) -> None:
        import pynvml

        self._nvml = pynvml if nvml is None else nvml
        self._error = pynvml.NVMLError
        self._handles: list[Any] | None = None

    def read(self) -> tuple[tuple[GpuReading, ...], str]:
        """The GPUs, and why there are none."""
        try:
            if self._handles is None:
                self._nvml.nvmlInit()
                count = self._nvml.nvmlDeviceGetCount()
                self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            gpus = tuple(self._gpu(index, handle) for index, handle in enumerate(self._handles))
        except self._error as error:  # no driver, or a GPU that fell off the bus: asked again next time
            self._handles = None
            return (), str(error)
        return gpus, "" if gpus else "the NVIDIA driver reports no GPU"

    def _gpu(self, index: int, handle: Any) -> GpuReading:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        reasons = ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return GpuReading(
            index,
            self._nvml.nvmlDeviceGetName(handle),
            int(memory.used),
            int(memory.total),
            ask(self._nvml.nvmlDeviceGetTemperature, handle, 0),
            tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
        )


def read(url: str, gpus: GpuReader) -> Reading:
    """One look."""
    health: Mapping[str, Any] = {}
    metrics = Metrics({})
    problem = ""
    try:
        answer = httpx.get(f"{url}/health", timeout=LIMIT).json()
        health = answer if isinstance(answer, dict) else {}
        metrics = scrape(url, LIMIT)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        problem = f"{url} does not answer: {error or type(error).__name__}"
    except ScrapeError as error:
        problem = str(error)
    found, gpus_problem = gpus.read()
    return Reading(time.monotonic(), health, metrics, problem, found, gpus_problem)
