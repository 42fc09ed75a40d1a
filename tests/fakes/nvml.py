"""NVML recorded and played back: every call with its arguments and its result, as JSON.

`python -m tests.fakes.nvml FILE` records this machine's. A handle is written as its GPU's index.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

FIELDS = ("total", "used", "busId", "pid", "usedGpuMemory", "bar1Total", "gpu")


class Recorder:
    """Passes calls on to pynvml and remembers them."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}
        self._handles: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            key = f"{name}({','.join(str(self._handles.get(id(value), value)) for value in arguments)})"
            try:
                answer = getattr(pynvml, name)(*arguments)
            except pynvml.NVMLError as error:
                self.calls[key] = {"error": error.value}
                raise
            if name == "nvmlDeviceGetHandleByIndex":
                self._handles[id(answer)] = arguments[0]
            else:
                self.calls[key] = _plain(answer)
            return answer

        return call


class Replay:
    """Answers calls from a recording; one that it lacks is a mistake of the test."""

    def __init__(self, calls: dict[str, Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "nvmlDeviceGetHandleByIndex":
                return arguments[0]
            answer = self._calls[f"{name}({','.join(map(str, arguments))})"]
            if isinstance(answer, dict) and "error" in answer:
                raise pynvml.NVMLError(answer["error"])
            return _objects(answer)

        return call


def invent(monkeypatch: pytest.MonkeyPatch, cards: Sequence[tuple[str, str, int, bool]]) -> None:
    """Puts made-up cards into pynvml: (name, capability, GiB, NVLink); UUIDs are GPU-<index>-uuid."""

    def capability(handle: int) -> tuple[int, int]:
        major, minor = cards[handle][1].split(".")
        return int(major), int(minor)

    replies: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": capability,
        "nvmlDeviceGetName": lambda handle: cards[handle][0],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}-uuid",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=cards[handle][2] * 2**30 * 16160 // 16384),
        "nvmlDeviceGetNvLinkState": lambda handle, link: cards[handle][3],
    }
    for name, reply in replies.items():
        monkeypatch.setattr(pynvml, name, reply)


def _plain(answer: Any) -> Any:
    if isinstance(answer, list | tuple):
        return [_plain(one) for one in answer]
    if isinstance(answer, int | str | float) or answer is None:
        return answer
    return {name: getattr(answer, name) for name in FIELDS if hasattr(answer, name)}


def _objects(answer: Any) -> Any:
    if isinstance(answer, dict):
        return SimpleNamespace(**answer)
    return [_objects(one) for one in answer] if isinstance(answer, list) else answer


if __name__ == "__main__":
    from server.doctor.nvml import read

    recorder = Recorder()
    read(recorder)
    Path(sys.argv[1]).write_text(json.dumps(recorder.calls, indent=1) + "\n")
