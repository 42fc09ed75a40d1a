import time
from dataclasses import replace

import pytest

from server.cluster.link import (
    config_from,
    config_message,
    gpu_messages,
    gpus_from,
    greeting,
    line,
    purpose_of,
    status_from,
    status_message,
)
from server.config.devices import Device, Devices
from server.config.settings import load_config
from server.decisions import Decision
from server.diagnosis import Diagnosis
from server.gateway.gpu_metrics import Reading
from server.supervisor import Progress, State, Status

GPU = Device("Tesla V100-PCIE-16GB", "GPU-0", "7.0", 16, nvlink=False)


@pytest.mark.parametrize("purpose", ["engine", "status"])
def test_whoever_has_the_secret_is_let_in(purpose: str) -> None:
    assert purpose_of(greeting("s" * 64, purpose).rstrip(), "s" * 64) == purpose  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "first",
    [b"", b"GET / HTTP/1.1", b"voltserve/1 wrong engine", b"voltserve/2 right engine", b"voltserve/1 right shell",
     b"voltserve/1 right", b"voltserve/1 right engine more", "voltserve/1 \u00fc engine".encode()],
)  # fmt: skip
def test_others_are_not(first: bytes) -> None:
    assert purpose_of(first, "right") is None


def test_a_configuration_arrives_as_it_was_sent() -> None:
    flags = ["--model", "m", "--max-model-len", "4096", "--speculative-config", '{"method": "ngram"}', "--preset"]
    sent = load_config([*flags, "v100x1-16g"], {}, lambda: Devices((GPU,)))
    assert config_from(config_message(sent)) == sent


def test_a_status_arrives_with_its_times_seen_from_here() -> None:
    now = time.monotonic()
    found = Diagnosis("oom", "out of memory", "memory", "too long", ("lower it", "or buy"), "OOM")
    sent = Status(
        State.FAILED, "why", since=now - 5, started_at=now - 60, progress=Progress("weights", 1, 2, "bytes"),
        restarts=3, last_exit="exited", decisions=(Decision("a", "b", "c"),), retry_at=now + 4, diagnosis=found,
        warnings=("odd",), given_up=True,
    )  # fmt: skip
    got = status_from(status_message(sent))
    for name in ("since", "started_at", "retry_at"):
        assert getattr(got, name) == pytest.approx(getattr(sent, name), abs=1.0)
    same = {name: getattr(sent, name) for name in ("since", "started_at", "retry_at")}
    assert replace(got, **same) == sent


def test_gpus_are_told_apart_by_their_replica() -> None:
    sent = [Reading(0, "V100", 1, 2, 40), Reading(1, "V100", 1, 2, None, 3, ("power cap",), "lost")]
    assert [one.index for one in gpus_from(gpu_messages(sent), "m-1")] == ["m-1/0", "m-1/1"]


def test_a_message_is_one_line() -> None:
    assert line(reason="a\nb", load=1) == b'{"reason":"a\\nb","load":1}\n'
