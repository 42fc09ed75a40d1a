"""The state to which a service must return once all requests have ended."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from tests.e2e.conftest import Service
from tests.waiting import wait_until

GAUGES = (
    "voltserve_requests_in_flight",
    "voltserve_requests_queued",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
# The memory that engine and gateway may keep after thousands of requests. vLLM keeps compiled grammars, up to
# VLLM_XGRAMMAR_CACHE_MB (512). The pages of its 1 GiB key/value cache take memory once they were written to.
MEMORY_MIB = 2048
DESCRIPTORS = 8  # more in a process: connections between gateway and engine that wait for the next request


REST_S = 60.0  # in which it returns to rest


@dataclass(frozen=True)
class State:
    """A service at rest.

    Attributes:
        engine: ids of its processes, the gateway's first.
        descriptors: open ones of each process.
        memory_mib: resident, of all of them.
    """

    engine: tuple[int, ...]
    restarts: int
    busy: dict[str, float]
    descriptors: dict[int, int]
    memory_mib: int

    @classmethod
    def of(cls, service: Service) -> State:
        """The state now."""
        processes = service.processes()
        health = service.health()
        assert health is not None, "the gateway does not answer"
        return cls(
            engine=tuple(process.pid for process in processes),
            restarts=health[1]["restarts"],
            busy={name: service.metric(name) for name in GAUGES},
            descriptors={process.pid: process.num_fds() for process in processes},
            memory_mib=sum(process.memory_info().rss for process in processes) >> 20,
        )

    def differences(self, later: State) -> list[str]:
        """What is not as it was; memory and descriptors may have grown within their bounds."""
        found = [
            f"{name}: {getattr(self, name)} before, {getattr(later, name)} after"
            for name in ("engine", "restarts", "busy")
            if getattr(self, name) != getattr(later, name)
        ]
        if any(later.descriptors.get(pid, 0) > count + DESCRIPTORS for pid, count in self.descriptors.items()):
            found.append(
                f"descriptors: {self.descriptors} before, {later.descriptors} after, at most {DESCRIPTORS} more of each"
            )
        if later.memory_mib > self.memory_mib + MEMORY_MIB:
            found.append(f"memory: {self.memory_mib} MiB before, {later.memory_mib} after, at most {MEMORY_MIB} more")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return asdict(self)


def settled(service: Service, before: State | None = None) -> State:
    """The state once no request is at the engine; if it returns to `before`, the state then."""

    def rests() -> bool:
        now = State.of(service)
        return not any(now.busy.values()) if before is None else not before.differences(now)

    with contextlib.suppress(AssertionError):  # the caller judges
        wait_until(rests, REST_S, "no request at the engine", 0.5)
    return State.of(service)
