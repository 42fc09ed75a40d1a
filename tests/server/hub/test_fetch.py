"""`voltserve model fetch` against a local hub: what arrives, what is left out, what is recorded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import snapshot_download

from server.hub import fetch as fetching
from tests.fakes.hub import Fault, Hub, Repository, sha256

from .conftest import NAME, contents, model_on, run, without_manifest

SOURCES = ("hf", "modelscope", "url")


def named(hub: Hub, kind: str, name: str = NAME) -> str:
    return f"{hub.url}/plain/{name}/" if kind == "url" else f"{kind}:{name}"


@pytest.mark.parametrize("kind", SOURCES)
def test_a_model_arrives_whole_and_verifies(hub: Hub, tmp_path: Path, kind: str) -> None:
    code, out = run("model", "fetch", named(hub, kind), tmp_path / "model")
    assert code == 0, out
    assert without_manifest(contents(tmp_path / "model")) == model_on(hub)
    code, out = run("verify", tmp_path / "model")
    assert code == 0
    assert f"{len(model_on(hub))} sha256 digests compared" in out
    assert not list(tmp_path.glob("*.incomplete"))


def test_the_hubs_own_client_gets_the_same_from_this_hub(hub: Hub, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    snapshot_download(NAME, local_dir=theirs, endpoint=hub.url, token=False, max_workers=2)
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "ours")[0] == 0
    shutil.rmtree(theirs / ".cache")
    assert without_manifest(contents(tmp_path / "ours")) == contents(theirs)


@pytest.mark.parametrize("kind", SOURCES)
def test_only_what_serving_needs_is_fetched(hub: Hub, tmp_path: Path, kind: str) -> None:
    needed = dict(model_on(hub))
    unneeded = {
        "consolidated.safetensors": b"twice" * 2000,
        "pytorch_model.bin": b"pickle" * 1000,
        "modeling_custom.py": b"raise SystemExit(1)",
        "model.gguf": b"GGUF",
        "figure.png": b"PNG",
        ".gitattributes": b"*",
        "spare.safetensors": b"unlisted",
    }
    if kind != "url":  # an index page has no folders
        unneeded |= {"original/params.json": b"{}", "onnx/model.onnx": b"onnx"}
    hub.repositories[NAME].files.update(unneeded)
    code, out = run("model", "fetch", named(hub, kind), tmp_path / "model")
    assert code == 0, out
    assert without_manifest(contents(tmp_path / "model")) == needed
    record = json.loads((tmp_path / "model/.voltserve-source.json").read_text())
    assert {one["name"] for one in record["left_out"]} == unneeded.keys()
    assert "left out, the weights once more: 1 files, 10.0 kB ('consolidated.safetensors')" in out
    assert "left out, code, which is never run here: 1 files, 0.0 kB ('modeling_custom.py')" in out
    fetched = " ".join(f"{line} " for line in hub.requests if line.startswith("GET"))
    assert not [name for name in unneeded if f"/{name} " in fetched or f"FilePath={name}" in fetched]


def test_the_revision_is_pinned_and_recorded(hub: Hub, tmp_path: Path) -> None:
    old = Repository({**model_on(hub), "LICENSE": b"old"}, commit="0" * 40)
    hub.repositories[NAME].revisions["v1"] = old
    assert run("model", "fetch", f"hf:{NAME}@v1", tmp_path / "old")[0] == 0
    assert (tmp_path / "old/LICENSE").read_bytes() == b"old"
    record = json.loads((tmp_path / "old/.voltserve-source.json").read_text())
    assert (record["asked"], record["revision"], record["source"]) == ("v1", "0" * 40, f"hf:{NAME}")
    files = [line for line in hub.requests if "/resolve/" in line]
    assert files
    assert all(f"/resolve/{'0' * 40}/" in line for line in files)


def test_a_fetch_that_goes_on_keeps_its_commit_when_the_branch_moves(hub: Hub, tmp_path: Path) -> None:
    hub.always["model-00002-of-00002.safetensors"] = status(404)
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 69
    before = hub.repositories[NAME]
    after = Repository({**before.files, "LICENSE": b"newer"}, commit="2" * 40, revisions={"1" * 40: before})
    hub.repositories[NAME] = after
    hub.always.clear()
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert without_manifest(contents(tmp_path / "model")) == before.files


def test_the_same_command_again_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    hub.requests.clear()
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert (code, hub.requests) == (0, [])
    assert "already" in out
    code, out = run("model", "fetch", f"hf:{NAME}@v2", tmp_path / "model")
    assert code == 69
    assert "name another directory" in out


def test_a_directory_with_other_files_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.txt").write_text("mine")
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "expected an empty directory or nothing, got files" in out
    assert contents(tmp_path / "model") == {"mine.txt": b"mine"}


def test_an_unfinished_fetch_of_another_model_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    hub.always["config.json"] = status(404)
    run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    hub.repositories["owner/other"] = hub.repositories[NAME]
    code, out = run("model", "fetch", "hf:owner/other", tmp_path / "model")
    assert code == 69
    assert f"is an unfinished fetch of hf:{NAME}" in out


def test_nothing_is_left_where_the_model_does_not_exist(hub: Hub, tmp_path: Path) -> None:
    assert run("model", "fetch", "hf:owner/nothing", tmp_path / "model")[0] == 69
    assert [path.name for path in tmp_path.iterdir()] == ["on-the-hub"]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_found_before_the_first_byte(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.hub.fetch.shutil.disk_usage", lambda _: Usage(10, 9, 1))
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "0.00 GB are free; make room for 0.07 GB more" in out
    assert not [line for line in hub.requests if ".safetensors" in line and "index" not in line]


def test_what_is_there_already_needs_no_room(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.always["config.json"] = status(404)
    run("model", "fetch", f"hf:{NAME}", tmp_path / "model", "--parallel", 1)
    hub.always.clear()
    left = fetching.MARGIN + sum(map(len, model_on(hub).values()))
    monkeypatch.setattr("server.hub.fetch.shutil.disk_usage", lambda _: Usage(left, 0, left))
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0


def test_two_runs_at_once_do_not_mix(hub: Hub, tmp_path: Path) -> None:
    with fetching._folder_of(tmp_path / "model"):
        code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "is in use: another run fetches" in out


def test_files_have_the_usual_rights(hub: Hub, tmp_path: Path) -> None:
    run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o444 for path in (tmp_path / "model").iterdir()} == {0o444}


def test_digests_of_a_folder_are_those_of_its_list(hub: Hub, tmp_path: Path) -> None:
    files = model_on(hub)
    wrong = "".join(f"{sha256(data) if name != 'config.json' else '0' * 64}  {name}\n" for name, data in files.items())
    hub.repositories[NAME].files["SHA256SUMS"] = wrong.encode()
    code, out = run("model", "fetch", named(hub, "url"), tmp_path / "model")
    assert code == 69
    assert f"config.json: expected sha256 {'0' * 64}" in out


def test_a_pipe_gets_log_lines_of_all_files_together(hub: Hub, tmp_path: Path) -> None:
    out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[1]
    assert "] fetching  done=" in out
    assert "] model-00001" not in out


def status(code: int, **headers: str) -> Fault:
    return Fault(status=code, headers=headers)


def test_the_users_umask_does_not_matter_to_the_container(hub: Hub, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o005 == 0o005
