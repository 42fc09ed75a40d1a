"""The reading of NVML, from recordings: a real one of two H200, and two of V100s made after its form.

What doctor asks since (cooling, power, persistence mode, BAR1, use) was recorded of one H200 and stands for both.
"""

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest

from server.doctor.nvml import Reading, read
from tests.fakes.nvml import Replay

RECORDINGS = Path(__file__).parent / "recordings"


def calls(name: str, **changes: Any) -> dict[str, Any]:
    """A recording; a change's name is the call's without arguments, and holds for GPU 0's."""
    recorded: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    for function, answer in changes.items():
        keys = [key for key in recorded if key.startswith((f"{function}(0", f"{function}()"))]
        assert keys, function
        recorded |= dict.fromkeys(keys, answer)
    return recorded


def reading(name: str, **changes: Any) -> Reading:
    return read(Replay(calls(name, **changes)))


def test_the_real_recording_is_read() -> None:
    found = reading("h200x2")
    assert (found.driver, found.cuda) == ("580.159.04", "13.0")
    assert [gpu.capability for gpu in found.gpus] == ["9.0", "9.0"]
    assert found.gpus[0].retired is None  # newer cards remap rows and have no retired pages
    assert found.gpus[0].pcie_width == (16, 16)
    assert found.pairs[0].nvlink  # through a switch
    assert found.pairs[0].peer_access


def test_v100s_on_nvlink_are_joined_directly() -> None:
    found = reading("v100x2-sxm2")
    assert [len(gpu.peers) for gpu in found.gpus] == [2, 2]
    assert found.gpus[0].peers[0] == found.gpus[1].pci
    assert found.pairs[0].nvlink
    assert found.gpus[0].retired == (0, False)


def test_v100s_on_pcie_have_no_links() -> None:
    found = reading("v100x2-pcie")
    assert not found.gpus[0].peers
    assert not found.pairs[0].nvlink
    assert found.pairs[0].meet == "one host bridge"


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPages",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetNumFans",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetBAR1MemoryInfo",
        "nvmlDeviceGetUtilizationRates",
    ],
)
def test_what_a_card_does_not_say_is_unknown_and_the_rest_is_read(function: str) -> None:
    found = reading("v100x2-pcie", **{function: {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}})
    assert found.gpus[0].name == "Tesla V100-PCIE-16GB"
    assert not found.problem


def test_the_reasons_for_lower_clocks_are_named() -> None:
    found = reading("v100x2-pcie", nvmlDeviceGetCurrentClocksThrottleReasons=0x44)
    assert found.gpus[0].throttle == ("power cap", "hardware thermal slowdown")


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, True),
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}}, True),
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}}, False),
        ({"nvmlDeviceGetMemoryInfo": {"error": pynvml.NVML_ERROR_GPU_IS_LOST}}, False),
        ({"nvmlDeviceGetTemperature": {"error": pynvml.NVML_ERROR_GPU_IS_LOST}}, False),
    ],
)
def test_a_driver_that_does_not_answer_is_told_from_none(changes: dict[str, Any], absent: bool) -> None:
    found = reading("v100x2-pcie", **changes)
    assert found.problem
    assert found.absent is absent
    assert not found.gpus
