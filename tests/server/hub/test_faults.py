"""Hubs, mirrors and lines that fail in every way: what passes is waited for, what stays is named; nothing is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from server.hub import http, transfer
from tests.fakes.hub import Fault, Hub, Repository

from .conftest import NAME, contents, model_on, run, without_manifest

SHARD = "model-00001-of-00002.safetensors"
BIG = bytes(range(256)) * 4096  # 1 MiB

PASSING = {
    "429 with a time to wait": [Fault(429, {"Retry-After": "0"})] * 3,
    "429 with the hub's own header": [Fault(429, {"RateLimit": '"resolvers";r=0;t=0'})],
    "500": [Fault(500)],
    "502, 503 and 504": [Fault(502), Fault(503), Fault(504)],
    "cut before the first byte": [Fault(cut=0)],
    "cut three times": [Fault(cut=5000), Fault(cut=7000), Fault(cut=1)],
    "cut, then ranges are ignored": [Fault(cut=9000), Fault(ignore_range=True)],
    "cut, then ranges are wrong": [Fault(cut=9000), Fault(wrong_range=True)],
    "one wrong byte, once": [Fault(flip=True)],
    "too long, once": [Fault(resize=100)],
    "too short, once": [Fault(resize=-100)],
    "a login page, once": [Fault(page=True)],
    "slow": [Fault(slow=0.05)],
}


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING.keys())
@pytest.mark.parametrize("kind", ["hf", "modelscope"])
def test_a_fault_that_passes_costs_nothing_but_time(hub: Hub, tmp_path: Path, faults: list[Fault], kind: str) -> None:
    hub.faults[SHARD] = list(faults)
    code, out = run("model", "fetch", f"{kind}:{NAME}", tmp_path / "model")
    assert code == 0, out
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)
    assert hub.faults[SHARD] == []


LASTING = {
    "401": (Fault(401), "answered 401"),
    "403": (Fault(403), "accept the model's terms"),
    "404": (Fault(404), "answered 404"),
    "429": (Fault(429), "answered 429, 4 times; try again later"),
    "503": (Fault(503), "answered 503, 4 times"),
    "cut": (Fault(cut=10), "4 times"),
    "one wrong byte": (Fault(flip=True), "expected sha256"),
    "too long": (Fault(resize=100), "by the list, got"),
    "too short": (Fault(resize=-100), "by the list, got"),
    "a login page": (Fault(page=True), "a web page, twice"),
}


@pytest.mark.parametrize(("fault", "said"), LASTING.values(), ids=LASTING.keys())
def test_a_fault_that_stays_is_named_and_the_rest_is_kept(hub: Hub, tmp_path: Path, fault: Fault, said: str) -> None:
    hub.always[SHARD] = fault
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model", "--parallel", 1)
    assert code == 69
    assert said in out
    assert SHARD in out or "answered" in out
    assert not (tmp_path / "model").exists()
    assert (tmp_path / "model.incomplete").is_dir()
    kept = contents(tmp_path / "model.incomplete")
    hub.always.clear()
    hub.requests.clear()
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)
    again = [name for name in kept if any(f"/{name}" in line for line in hub.requests)]
    assert [name for name in again if not name.endswith((".part", ".index.json"))] == []


@pytest.mark.parametrize("kind", ["hf", "modelscope", "url"])
def test_a_small_file_that_is_not_the_lists_is_refused(hub: Hub, tmp_path: Path, kind: str) -> None:
    hub.always["config.json"] = Fault(flip=True)
    source = f"{hub.url}/plain/{NAME}/" if kind == "url" else f"{kind}:{NAME}"
    code, out = run("model", "fetch", source, tmp_path / "model")
    if kind == "url":  # nothing there says what the bytes are: verify does afterwards
        assert code == 0
        assert "is missing" in run("verify", tmp_path / "model")[1] or run("verify", tmp_path / "model")[0] == 65
    else:
        assert code == 69
        assert "config.json: expected " in out


def test_what_has_come_before_a_cut_is_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME].files["tokenizer.model"] = BIG
    hub.faults["tokenizer.model"] = [Fault(cut=700_000)]
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    ranges = [line.rpartition(" ")[2] for line in hub.requests if "X-Amz" in line and "bytes=" in line]
    assert ranges == ["bytes=700000-"]
    assert hub.sent < 2 * len(BIG)


def test_a_folder_that_changes_between_two_runs_is_begun_anew(hub: Hub, tmp_path: Path) -> None:
    source = f"{hub.url}/plain/{NAME}/"
    hub.repositories[NAME].files["tokenizer.model"] = BIG
    hub.faults["tokenizer.model"] = [Fault(), Fault(cut=500_000)]  # the first answers HEAD
    hub.always["tokenizer.model"] = Fault(404)
    assert run("model", "fetch", source, tmp_path / "model")[0] == 69
    hub.always.clear()
    hub.repositories[NAME].files["tokenizer.model"] = newer = b"n" * len(BIG)
    assert run("model", "fetch", source, tmp_path / "model")[0] == 0
    assert (tmp_path / "model/tokenizer.model").read_bytes() == newer


def test_the_list_is_waited_for_too(hub: Hub, tmp_path: Path) -> None:
    hub.faults["list"] = [Fault(503), Fault(429, {"Retry-After": "0"})]
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0


def test_a_hub_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.front.shutdown()
    hub.front.server_close()
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert f"{hub.url} does not answer" in out
    assert "another --endpoint" in out


def full(_output: BinaryIO, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_loses_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].files["tokenizer.model"] = BIG
    written = 0
    write = transfer._write

    def until_full(output: BinaryIO, data: bytes) -> None:
        nonlocal written
        written += len(data)
        if written > 600_000:
            full(output, data)
        write(output, data)

    monkeypatch.setattr(transfer, "_write", until_full)
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model", "--parallel", 1)
    assert code == 69
    assert "the disk is full, tokenizer.model is not whole; make room and give the same command again" in out
    monkeypatch.setattr(transfer, "_write", write)
    hub.sent = 0
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert hub.sent < 700_000
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more" * len(BIG))


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("harm", [damaged, longer, shorter, Path.unlink])
def test_what_happens_to_the_pieces_between_two_runs_is_noticed(
    hub: Hub, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    hub.repositories[NAME].files["tokenizer.model"] = BIG
    hub.faults["tokenizer.model"] = [Fault(cut=600_000)]
    hub.always["tokenizer.model"] = Fault(404)
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model", "--parallel", 1)[0] == 69
    hub.always.clear()
    for path in (tmp_path / "model.incomplete").iterdir():
        if not path.name.startswith("."):
            harm(path)
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)


def test_no_more_is_waited_than_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    patience = http.Patience("x")
    monkeypatch.setattr(patience._stop, "wait", waited.append)
    patience.wait(http.PassingError("429", 1e6))
    assert waited == [120.0]


def test_a_gated_model_asks_for_its_terms(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository(model_on(hub), token="hf_right", gated=True)
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "set HF_TOKEN or --token-file" in out
