from __future__ import annotations

import pytest

from engine import gpus, plugin
from engine.environment import FORCE_VOLTA
from engine.volta import Gpu

UUIDS = ["GPU-aaaa", "GPU-abbb", "GPU-cccc"]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,0", (2, 0)),
        (" 1 ", (1,)),
        ("GPU-c,0", (2, 0)),
        ("GPU-aa,GPU-ab", (0, 1)),
        ("GPU-a", ()),  # two begin so
        ("0,7,1", (0,)),  # the first invalid entry ends the list
        ("0,-1,1", (0,)),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(entries: str | None, expected: tuple[int, ...]) -> None:
    assert gpus.select(UUIDS, entries) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_the_force_variable_is_0_or_1(value: str | None, expected: bool) -> None:
    assert gpus.forced({} if value is None else {FORCE_VOLTA: value}) is expected


def test_another_value_of_the_force_variable_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected 0 or 1, got 'yes'"):
        gpus.forced({FORCE_VOLTA: "yes"})


def test_kernels_for_cpus_get_the_platform_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: (Gpu(0, "Tesla V100", (7, 0)),))
    assert plugin.platform() == "engine.cpu.platform.RecordingCpuPlatform"


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([(7, 0)], "engine.platform.VoltaPlatform"),
        ([], "engine.cpu.platform.RecordingCpuPlatform"),
        # Refused later, in `register`: here vLLM would swallow the error and take its own platform.
        ([(9, 0)], "engine.platform.VoltaPlatform"),
        ([(7, 0), (9, 0)], "engine.platform.VoltaPlatform"),
    ],
)
def test_the_platform_plugin_answers_by_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], expected: str | None
) -> None:
    monkeypatch.setattr(gpus, "kernels_are_for_gpus", lambda: True)
    found = tuple(Gpu(index, "GPU", capability) for index, capability in enumerate(capabilities))
    monkeypatch.setattr(gpus, "visible", lambda: found)
    assert plugin.platform() == expected


def test_mixed_gpus_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "kernels_are_for_gpus", lambda: True)
    monkeypatch.setattr(gpus, "visible", lambda: (Gpu(0, "Tesla V100", (7, 0)), Gpu(1, "NVIDIA H200", (9, 0))))
    plugin.register.cache_clear()
    with pytest.raises(ValueError, match=r"GPU 1 NVIDIA H200 \(9\.0\)"):
        plugin.register()
