"""Repositories that mean harm: nothing is written outside the directory, nothing is run, nothing has no bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import HubError
from server.hub.source import parse_source
from tests.fakes.hub import Hub

from .conftest import NAME, contents, model_on, run, without_manifest

NAMES = (
    *("../escape.json", "../../escape.json", "/etc/escape.json", "a/../../escape.json", "..", ".", ""),
    *(
        "a\\..\\escape.json",
        "line\nbreak.json",
        "nul\0.json",
        "\x1b[31mred.json",
        "x" * 300 + ".json",
        "\u202egpj.json",
    ),
    *(".voltserve-fetch.json", ".voltserve-source.json", "SHA256SUMS", ".ssh/config.json", "~/escape.json"),
)


@pytest.mark.parametrize("kind", ["hf", "modelscope"])
def test_no_name_leads_out_of_the_directory(hub: Hub, tmp_path: Path, kind: str) -> None:
    good = dict(model_on(hub))
    hub.repositories[NAME].files.update(dict.fromkeys(NAMES, b'{"hostile": true}'))
    room = tmp_path / "room" / "models"
    room.mkdir(parents=True)
    code, out = run("model", "fetch", f"{kind}:{NAME}", room / "model")
    assert code == 0, out
    assert without_manifest(contents(room / "model")) == good
    assert [path.name for path in room.iterdir()] == ["model"]
    assert [path.name for path in room.parent.iterdir()] == ["models"]
    assert "\x1b" not in out
    assert "hostile" not in (room / "model/.voltserve-source.json").read_text().partition('"left_out"')[0]


@pytest.mark.parametrize(
    "shard", ["../escape.safetensors", "/etc/escape.safetensors", 7, "model.bin", "a/b.safetensors"]
)
def test_an_index_that_leads_elsewhere_is_refused(hub: Hub, tmp_path: Path, shard: Any) -> None:
    index = {"weight_map": {"a": shard}}
    hub.repositories[NAME].files["model.safetensors.index.json"] = json.dumps(index).encode()
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "model.safetensors.index.json: expected shards' file names" in out


def test_a_name_twice_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME].files["LICENSE"] = b"first"
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0


@pytest.mark.parametrize("where", ["config.json", "config.json.part", "model-00001-of-00002.safetensors.part"])
def test_a_link_in_the_unfinished_folder_is_not_followed(hub: Hub, tmp_path: Path, where: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder = tmp_path / "model.incomplete"
    folder.mkdir()
    (folder / where).symlink_to(victim)
    run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert victim.read_bytes() == b"precious"


def test_a_link_in_place_of_the_directory_is_refused(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 69
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_git_link_in_the_repository_is_a_plain_file(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME].files["vocab.txt"] = b"/etc/passwd"  # how the hub serves a link
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    assert not (tmp_path / "model/vocab.txt").is_symlink()


def test_code_in_the_repository_is_not_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    code = f"import pathlib; pathlib.Path({str(trace)!r}).touch()\n".encode()
    config = json.loads(model_on(hub)["config.json"]) | {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}
    names = ("configuration_x.py", "modeling_x.py", "sitecustomize.py", "conftest.py", "setup.py", "tokenizer.py")
    hub.repositories[NAME].files.update(dict.fromkeys(names, code) | {"config.json": json.dumps(config).encode()})
    monkeypatch.chdir(tmp_path)
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
    for command in ("verify", "inspect"):
        run(command, tmp_path / "model")
        run(command, f"hf:{NAME}")
    assert not trace.exists()
    assert not list((tmp_path / "model").glob("*.py"))


CLAIMS = {
    "a negative size": {"size": -1},
    "no size": {"size": None},
    "a size in words": {"size": "large"},
    "a huge size": {"size": 10**18, "lfs": {"sha256": "0" * 64, "size": 10**18, "pointerSize": 1}},
    "a digest that is none": {"lfs": {"sha256": "../x", "size": 5, "pointerSize": 1}},
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_list_that_claims_nonsense_is_refused(hub: Hub, tmp_path: Path, claim: dict[str, Any]) -> None:
    hub.repositories[NAME].claims["model-00001-of-00002.safetensors"] = claim
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert "voltserve: " in out
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("answer", [b"", b"[]", b"null", b'{"sha": 7}', b"{" * 10**5, b"<html>", b'{"siblings": 5}'])
def test_an_answer_that_is_no_list_is_refused(
    hub: Hub, tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def route(self: Any, _path: str, _query: object) -> None:
        self.plain(200, answer)

    monkeypatch.setattr(hub.front.RequestHandlerClass, "route", route)
    for kind in ("hf", "modelscope"):
        code, out = run("model", "fetch", f"{kind}:{NAME}", tmp_path / "model")
        assert code == 69
        assert "Traceback" not in out


@pytest.mark.parametrize(
    "text",
    [
        *("hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a/b@", "hf:a/b@../x", "hf:a/b@x y", "hf:-a/b"),
        *("modelscope:a", "http://", "https:///x", "http://host:99999/x/", "hf:a/b\n"),
    ],
)
def test_a_source_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(HubError):
        parse_source(text, environ={})


@pytest.mark.parametrize("endpoint", ["ftp://x", "file:///etc", "x", "http://", "http://a b"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(HubError, match="expected a URL"):
        parse_source("hf:a/b", endpoint, environ={})


def test_a_redirect_to_a_file_is_not_followed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def route(self: Any, _path: str, _query: object) -> None:
        self.plain(302, headers={"Location": "file:///etc/passwd"})

    monkeypatch.setattr(hub.front.RequestHandlerClass, "route", route)
    assert run("model", "fetch", f"modelscope:{NAME}", tmp_path / "model")[0] == 69


def test_a_circle_of_redirects_ends(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def route(self: Any, path: str, _query: object) -> None:
        self.plain(302, headers={"Location": path})

    monkeypatch.setattr(hub.front.RequestHandlerClass, "route", route)
    for kind in ("hf", "modelscope"):
        assert run("model", "fetch", f"{kind}:{NAME}", tmp_path / "model")[0] == 69
