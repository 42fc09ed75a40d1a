from typing import Any

import pynvml
import pytest

from server.doctor.findings import Finding
from server.doctor.gpu_findings import check_gpus

from .test_nvml import reading


def findings(name: str = "v100x2-pcie", **changes: Any) -> list[Finding]:
    return list(check_gpus(reading(name, **changes)))


def of(check: str, name: str = "v100x2-pcie", **changes: Any) -> Finding:
    """The finding of a check that is about GPU 0, or the machine."""
    return next(
        finding for finding in findings(name, **changes) if finding.check == check and "GPU 1" not in finding.what
    )


@pytest.mark.parametrize("name", ["v100x2-pcie", "v100x2-sxm2"])
def test_healthy_v100s_are_fine(name: str) -> None:
    assert {finding.level for finding in findings(name)} <= {"ok", "info"}
    checks = {"driver", "capability", "temperature", "power", "persistence", "ecc", "topology"}
    assert checks <= {f.check for f in findings(name)}


@pytest.mark.parametrize(
    ("version", "level"),
    [("418.226.00", "error"), ("535.230.02", "ok"), ("550.163.01", "ok"), ("580.1", "ok"), ("590.1", "warning")],
)
def test_the_driver_s_branch_is_judged(version: str, level: str) -> None:
    assert of("driver", nvmlSystemGetDriverVersion=version).level == level


def test_no_driver_is_worth_knowing_and_a_broken_one_an_error() -> None:
    (absent,) = findings(nvmlInit={"error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    (broken,) = findings(nvmlInit={"error": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    assert (absent.level, broken.level) == ("info", "error")
    assert "nvidia-smi" in broken.remedy


def test_a_driver_without_gpus_is_an_error() -> None:
    assert of("gpus", nvmlDeviceGetCount=0).level == "error"


def test_every_gpu_s_capability_counts_not_only_the_first_one_s() -> None:
    found = findings(nvmlDeviceGetCudaComputeCapability=[8, 0])
    mixed = next(finding for finding in found if finding.expected == "GPUs of one kind")
    assert mixed.level == "warning"
    assert "GPU 0: Tesla V100-PCIE-16GB (8.0), GPU 1: Tesla V100-PCIE-16GB (7.0)" in mixed.got
    assert "CUDA_VISIBLE_DEVICES" in mixed.remedy


def test_cards_of_different_size_are_mixed_too() -> None:
    assert of("capability", nvmlDeviceGetMemoryInfo={"total": 2**35, "used": 0}).level == "warning"


def test_other_gpus_than_v100s_are_warned_about() -> None:
    assert of("capability", "h200x2").level == "warning"


@pytest.mark.parametrize(
    ("celsius", "level"), [(79, "ok"), (80, "info"), (84, "info"), (85, "warning"), (97, "warning")]
)
def test_85_degrees_are_warned_about(celsius: int, level: str) -> None:
    assert of("temperature", nvmlDeviceGetTemperature=celsius).level == level


@pytest.mark.parametrize(("bits", "level"), [(0x04, "info"), (0x20, "warning"), (0x40, "warning"), (0x80, "warning")])
def test_throttling_is_told_by_reason(bits: int, level: str) -> None:
    assert of("throttling", nvmlDeviceGetCurrentClocksThrottleReasons=bits).level == level


def test_an_idle_card_is_not_throttled() -> None:
    assert not [finding for finding in findings() if finding.check == "throttling"]


@pytest.mark.parametrize(
    ("changes", "level", "got"),
    [
        ({"nvmlDeviceGetEccMode": [0, 0]}, "warning", "off"),
        ({"nvmlDeviceGetTotalEccErrors": 3}, "error", "3 since the driver started"),
    ],
)
def test_ecc_state_and_counters_are_judged(changes: dict[str, Any], level: str, got: str) -> None:
    finding = of("ecc", **changes)
    assert (finding.level, finding.got) == (level, got)


def test_errors_of_the_past_are_a_warning() -> None:
    from server.doctor.nvml import read
    from tests.fakes.nvml import Replay

    from .test_nvml import calls

    recorded = calls("v100x2-pcie")
    recorded["nvmlDeviceGetTotalEccErrors(0,1,1)"] = 2
    finding = next(one for one in check_gpus(read(Replay(recorded))) if one.check == "ecc")
    assert (finding.level, finding.got) == ("warning", "2 in its life")


@pytest.mark.parametrize(("pending", "level"), [(0, "warning"), (1, "error")])
def test_retired_pages_are_told(pending: int, level: str) -> None:
    found = findings(nvmlDeviceGetRetiredPages=[1, 2], nvmlDeviceGetRetiredPagesPendingStatus=pending)
    finding = next(one for one in found if one.what == "GPU 0 pages")
    assert finding.level == level
    assert finding.got.startswith("2 retired")


@pytest.mark.parametrize(
    ("celsius", "slowdown", "level"), [(82, 84, "warning"), (77, 84, "info"), (76, 84, "ok"), (84, 90, "info")]
)
def test_a_card_that_slows_down_early_is_warned_about_earlier(celsius: int, slowdown: int, level: str) -> None:
    finding = of("temperature", nvmlDeviceGetTemperature=celsius, nvmlDeviceGetTemperatureThreshold=slowdown)
    assert finding.level == level
    assert finding.got == f"{celsius} °C, and it slows itself down at {slowdown}"


@pytest.mark.parametrize(("fans", "says"), [(0, "is passive"), (2, "Improve the air flow")])
def test_a_hot_or_throttled_card_s_remedy_depends_on_its_cooling(fans: int, says: str) -> None:
    hot = of("temperature", nvmlDeviceGetTemperature=86, nvmlDeviceGetNumFans=fans)
    slow = of("throttling", nvmlDeviceGetCurrentClocksThrottleReasons=0x20, nvmlDeviceGetNumFans=fans)
    assert says in hot.remedy
    assert says in slow.remedy
    braked = of("throttling", nvmlDeviceGetCurrentClocksThrottleReasons=0x80, nvmlDeviceGetNumFans=fans)
    assert "power supply" in braked.remedy


@pytest.mark.parametrize(("milliwatts", "level", "got"), [(250000, "ok", "250 W"), (180000, "info", "180 W")])
def test_a_lowered_power_limit_is_told_with_the_default(milliwatts: int, level: str, got: str) -> None:
    finding = of("power", nvmlDeviceGetPowerManagementLimit=milliwatts)
    assert (finding.level, finding.expected, finding.got) == (level, "250 W, the default", got)
    assert ("-pl 250" in finding.remedy) == (level == "info")


@pytest.mark.parametrize(("on", "level"), [(1, "ok"), (0, "warning")])
def test_persistence_mode_is_judged(on: int, level: str) -> None:
    finding = of("persistence", nvmlDeviceGetPersistenceMode=on)
    assert finding.level == level
    assert ("-pm 1" in finding.remedy) == (level == "warning")


def test_a_card_in_use_names_the_processes() -> None:
    finding = of(
        "memory",
        nvmlDeviceGetMemoryInfo={"total": 16945512448, "used": 9 * 2**30},
        nvmlDeviceGetComputeRunningProcesses=[{"pid": 4242, "usedGpuMemory": 8 * 2**30}],
    )
    assert finding.level == "warning"
    assert finding.got == "9.0 GiB in use by process 4242 (8.0 GiB)"


def test_links_decide_what_is_said_of_a_pair() -> None:
    assert of("topology", "v100x2-sxm2").got == "joined by NVLink"
    finding = of("topology", nvmlDeviceGetTopologyCommonAncestor=50, nvmlDeviceGetP2PStatus=5)
    assert finding.got == "PCIe, meeting at two CPUs, no peer access"
    assert "-pcie preset" in finding.remedy
