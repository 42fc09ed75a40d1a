from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from server.config.devices import Device, find_devices, select_visible
from server.errors import PreflightError

GPUS = [Device(f"V100 {index}", f"GPU-{index}abc", "7.0", 16, nvlink=False, index=index) for index in range(3)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-1", [1]),
        ("GPU-2abc, 0", [2, 0]),
    ],
)
def test_cuda_visible_devices_leaves_what_it_names(visible: str | None, expected: list[int]) -> None:
    assert list(select_visible(GPUS, visible)) == [GPUS[index] for index in expected]


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    state: dict[str, object] = {"nvlink": False}
    replies = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (7, 0),
        "nvmlDeviceGetName": lambda handle: "Tesla V100-PCIE-16GB",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=16160 * 2**20),
        "nvmlDeviceGetNvLinkState": lambda handle, link: _link(state),
    }
    for name, reply in replies.items():
        monkeypatch.setattr(pynvml, name, reply)
    yield state


def _link(state: dict[str, object]) -> object:
    if state["nvlink"] is None:
        raise pynvml.NVMLError_NotSupported
    return state["nvlink"]


@pytest.mark.parametrize(("nvlink", "expected"), [(False, False), (True, True), (None, False)])
def test_gpus_are_described(two_cards: dict[str, object], nvlink: bool | None, expected: bool) -> None:
    two_cards["nvlink"] = nvlink
    found = find_devices({})
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0", "GPU-1"]
    assert {(gpu.capability, gpu.memory_gib, gpu.nvlink) for gpu in found.gpus} == {("7.0", 16, expected)}


def test_hidden_gpus_are_none_with_the_reason(two_cards: dict[str, object]) -> None:
    found = find_devices({"CUDA_VISIBLE_DEVICES": ""})
    assert not found.gpus
    assert "CUDA_VISIBLE_DEVICES" in found.reason


@pytest.mark.parametrize("error", [pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded])
def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", _raising(error))
    found = find_devices({})
    assert not found.gpus
    assert "no NVIDIA driver" in found.reason


def test_a_driver_that_does_not_answer_is_no_silent_fallback_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", _raising(pynvml.NVMLError_LibRmVersionMismatch))
    with pytest.raises(PreflightError, match="nvidia-smi"):
        find_devices({})


def _raising(error: type[Exception]) -> object:
    def fail() -> None:
        raise error

    return fail
