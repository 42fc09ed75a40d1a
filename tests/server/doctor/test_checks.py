from dataclasses import replace
from typing import Any

import pytest

from server.doctor.checks import check_all_reduce, check_disk, check_engine, check_host, check_p2p
from server.doctor.disk import Disk
from server.doctor.host import Host
from server.doctor.trial import Trial
from server.units import GIB

from .test_nvml import reading

HOST = Host(
    cores=8,
    memory_available=64 * GIB,
    shared_memory=16 * GIB,
    open_files=(1024, 65536),
    locked_memory=-1,
    affinity=frozenset(range(8)),
    container=False,
    docker=False,
    container_toolkit=False,
    device_nodes=("/dev/nvidia0",),
    address="127.0.0.1:8000",
    port_problem="",
)
DISK = Disk("m/model.safetensors", 20_000_000_000, "nvme0n1", False, 268_000_000, 0.134, "direct")
GPUS = reading("v100x2-pcie").gpus
PAIR = {"source": 0, "destination": 1, "peer_access": True, "wrong": 0, "bytes": 4, "gb_per_s": 11.5}


def level(host: Host, check: str, gpus: int = 2) -> str:
    return next((finding.level for finding in check_host(host, gpus, 20 * GIB) if finding.check == check), "none")


def test_a_machine_with_enough_of_everything_is_fine() -> None:
    assert {finding.level for finding in check_host(HOST, 2, 20 * GIB)} == {"ok"}


def test_the_engine_is_for_the_cards_of_the_machine() -> None:
    def found(gpus: Any, *, cpu_engine: bool) -> tuple[str, str]:
        (finding,) = check_engine(gpus, cpu_engine=cpu_engine)
        return finding.level, finding.remedy

    assert found(GPUS, cpu_engine=False)[0] == found((), cpu_engine=True)[0] == "ok"
    assert found([replace(gpu, capability="8.0") for gpu in GPUS], cpu_engine=True)[0] == "ok"
    unused, missing = found(GPUS, cpu_engine=True), found((), cpu_engine=False)
    assert (unused[0], missing[0]) == ("warning", "error")
    assert "make setup ENGINE=gpu" in unused[1]
    assert "make setup ENGINE=cpu" in missing[1]


@pytest.mark.parametrize(
    ("size", "gpus", "expected"),
    [
        (16 * GIB, 2, "ok"),
        (2 * GIB, 2, "warning"),
        (64 * 2**20, 2, "error"),
        (64 * 2**20, 1, "ok"),
        (None, 1, "warning"),
        (None, 2, "error"),
    ],
)
def test_several_gpus_need_shared_memory(size: int | None, gpus: int, expected: str) -> None:
    assert level(replace(HOST, shared_memory=size), "shm", gpus) == expected


@pytest.mark.parametrize(("hard", "expected"), [(-1, "ok"), (4096, "ok"), (1024, "warning")])
def test_the_limit_of_open_files_is_judged(hard: int, expected: str) -> None:
    assert level(replace(HOST, open_files=(1024, hard)), "ulimit") == expected


@pytest.mark.parametrize(
    ("limit", "gpus", "expected"), [(-1, 2, "ok"), (GIB, 2, "ok"), (8 * 2**20, 2, "warning"), (8 * 2**20, 1, "ok")]
)
def test_several_gpus_need_locked_memory(limit: int, gpus: int, expected: str) -> None:
    host = replace(HOST, locked_memory=limit)
    finding = next(one for one in check_host(host, gpus, 0) if one.what == "locked memory")
    assert finding.level == expected
    assert ("memlock" in finding.remedy) == (expected == "warning")


def test_little_memory_is_warned_about() -> None:
    assert level(replace(HOST, memory_available=5 * GIB), "memory") == "warning"


def test_a_taken_port_is_an_error() -> None:
    assert level(replace(HOST, port_problem="Address already in use"), "port") == "error"


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({"container": True, "device_nodes": ()}, 0, "info"),
        ({"container": True}, 2, "none"),
        ({"docker": True}, 2, "warning"),
        ({"docker": True}, 0, "none"),
        ({"docker": True, "container_toolkit": True}, 2, "ok"),
    ],
)
def test_what_containers_need_is_told(changes: dict[str, Any], gpus: int, expected: str) -> None:
    assert level(replace(HOST, **changes), "container", gpus) == expected


@pytest.mark.parametrize(
    ("changes", "kind", "speed"),
    [
        ({}, "ok", "ok"),
        ({"device": "", "rotational": None}, "ok", "ok"),
        ({"rotational": True, "seconds": 1.5}, "warning", "warning"),
        ({"rotational": True}, "ok", "ok"),  # a virtual disk
        ({"seconds": 10.0}, "ok", "error"),
    ],
)
def test_the_disk_s_kind_and_speed_are_judged(changes: dict[str, Any], kind: str, speed: str) -> None:
    assert [finding.level for finding in check_disk(replace(DISK, **changes), 900)] == [kind, speed]


def test_the_expected_load_time_follows_from_size_and_speed() -> None:
    assert DISK.load_seconds == pytest.approx(10)
    assert "2000 MB/s" in list(check_disk(DISK, 900))[1].got
    assert "20.00 GB load in 10 s" in list(check_disk(DISK, 900))[1].got


def p2p(**changes: Any) -> Trial:
    return Trial({"torch": "2.10.0", "architectures": ["sm_70", "sm_90"], "gpus": 2, "pairs": [{**PAIR, **changes}]})


def test_verified_bytes_are_fine_on_either_path() -> None:
    (direct,) = check_p2p(p2p(), GPUS)
    (staged,) = check_p2p(p2p(peer_access=False), GPUS)
    assert (direct.level, staged.level) == ("ok", "ok")
    assert "verified peer-to-peer, 11.5 GB/s" in direct.got
    assert "through host memory" in staged.got


def test_wrong_bytes_are_an_error_that_turns_peer_access_off() -> None:
    (finding,) = check_p2p(p2p(wrong=17), GPUS)
    assert finding.level == "error"
    assert "17 wrong elements" in finding.got
    assert "NCCL_P2P_DISABLE=1" in finding.remedy


def test_a_torch_without_code_for_the_gpu_is_an_error() -> None:
    trial = Trial({**p2p().answer, "architectures": ["sm_75", "sm_90"]})
    found = [finding for finding in check_p2p(trial, GPUS) if finding.check == "torch"]
    assert [finding.level for finding in found] == ["error", "error"]
    assert "sm_70" in found[0].expected


def test_a_trial_that_hangs_or_fails_is_an_error_with_advice() -> None:
    for trial in (Trial(timed_out=True, problem="no answer within 90 s"), Trial(problem="exited with 1: boom")):
        (finding,) = check_p2p(trial, GPUS)
        (reduced,) = check_all_reduce(trial)
        assert (finding.level, reduced.level) == ("error", "error")
        assert trial.problem in str(finding)
    assert "IOMMU" in next(check_p2p(Trial(timed_out=True, problem="x"), GPUS)).remedy
    assert "NCCL_P2P_DISABLE=1" in next(check_all_reduce(Trial(timed_out=True, problem="x"))).remedy
    assert "NCCL_DEBUG=INFO" in next(check_all_reduce(Trial(problem="x"))).remedy


@pytest.mark.parametrize(
    ("wrong", "host_memory", "levels"),
    [
        (0, "", ["ok", "ok"]),
        (5, "", ["error", "ok"]),
        (0, "rank 0: /dev/shm: No space left on device, 4526080 bytes are needed", ["ok", "warning"]),
    ],
)
def test_the_sums_of_all_reduces_are_judged(wrong: int, host_memory: str, levels: list[str]) -> None:
    answer = {"backend": "nccl", "ranks": 2, "wrong": wrong, "bytes": 2**25, "seconds": 0.0036}
    found = list(check_all_reduce(Trial({**answer, "host_memory": host_memory})))
    assert [finding.level for finding in found] == levels
    assert host_memory in found[1].got
