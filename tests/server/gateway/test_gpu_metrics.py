from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.config.devices import Device
from server.gateway import gpu_metrics as gpus
from server.gateway.gpu_metrics import GpuFigures, GpuMeter, Reading
from tests.server.gateway.inprocess import InProcess

V100 = Device("Tesla V100-PCIE-16GB", "GPU-1", "7.0", 16, nvlink=False)
SLOWED = ("power cap", "software thermal slowdown")
OLD = Device("A card without a sensor", "GPU-0", "7.0", 16, nvlink=False)


def temperature(handle: str, _: int) -> int:
    if handle == "GPU-0":
        raise pynvml.NVMLError_NotSupported
    return 71


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each reading of a GPU's memory, by UUID. A driver with two GPUs, in another order than the engine's."""
    made: list[str] = []

    def memory(handle: str) -> Any:
        made.append(handle)
        return SimpleNamespace(used=5 * 2**30, total=16 * 2**30)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", temperature)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetTotalEccErrors", lambda handle, kind, since: 3 if handle == "GPU-1" else 0
    )
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0x24)
    return made


def test_the_engine_s_gpus_are_read_in_its_order(calls: list[str]) -> None:
    assert GpuMeter([V100, OLD]).read() == [
        Reading(0, V100.name, 5 * 2**30, 16 * 2**30, 71, 3, SLOWED),
        Reading(1, OLD.name, 5 * 2**30, 16 * 2**30, None, 0, SLOWED),
    ]
    assert calls == ["GPU-1", "GPU-0"]


def test_the_driver_is_asked_once_a_second_at_most(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meter = GpuMeter([V100])
    for now[0] in (100.0, 100.5, 101.5):
        meter.read()
    assert len(calls) == 2


def test_gauges_hold_what_is_known(calls: list[str]) -> None:
    registry = CollectorRegistry()
    registry.register(GpuFigures(GpuMeter([V100, OLD]).read))
    text = generate_latest(registry).decode()
    assert 'voltserve_gpu_memory_used_bytes{gpu="1"} 5.36870912e+09' in text
    assert 'voltserve_gpu_temperature_celsius{gpu="0"} 71.0' in text
    assert 'voltserve_gpu_temperature_celsius{gpu="1"}' not in text
    assert 'voltserve_gpu_ecc_uncorrected_errors{gpu="0"} 3.0' in text
    assert 'voltserve_gpu_throttled{gpu="0",reason="software thermal slowdown"} 1.0' in text
    assert 'voltserve_gpu_throttled{gpu="0",reason="power brake"} 0.0' in text
    assert 'voltserve_gpu_up{gpu="1"} 1.0' in text
    assert len(calls) == 2


def test_a_lost_gpu_hides_no_other(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def one_lost(uuid: str) -> str:
        if uuid == "GPU-1":
            raise pynvml.NVMLError_GpuIsLost
        return uuid

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", one_lost)
    meter = GpuMeter([V100, OLD])
    lost, other = meter.read()
    assert (lost.memory_used, lost.problem) == (None, "GPU is lost")
    assert (other.memory_used, other.problem) == (5 * 2**30, "")
    registry = CollectorRegistry()
    registry.register(GpuFigures(meter.read))
    text = generate_latest(registry).decode()
    assert 'voltserve_gpu_up{gpu="0"} 0.0' in text
    assert 'voltserve_gpu_up{gpu="1"} 1.0' in text
    assert 'voltserve_gpu_throttled{gpu="0"' not in text
    assert 'voltserve_gpu_memory_used_bytes{gpu="0"' not in text


def test_a_driver_that_fails_is_no_failure_of_the_gateway_and_is_asked_again(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: str) -> Any:
        raise pynvml.NVMLError_GpuIsLost

    meter = GpuMeter([V100])
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
        assert [one.problem for one in meter.read()] == ["GPU is lost"]
    meter._read_at = float("-inf")
    assert [one.problem for one in meter.read()] == [""]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: lost(""))
    assert [one.problem for one in GpuMeter([V100, OLD]).read()] == ["GPU is lost"] * 2


async def test_without_gpus_nvml_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("asked"))
    here = InProcess()
    assert (await here.client.get("/health")).json()["gpus"] == []
    assert 'gpu="' not in (await here.client.get("/metrics")).text
