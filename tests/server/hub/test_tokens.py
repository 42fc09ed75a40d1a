"""Tokens reach the hub that they are for, and nothing else: no other host, no log, no file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from server.hub.source import parse_source
from tests.fakes.hub import Fault, Hub, Repository

from .conftest import NAME, model_on, run

TOKEN = "hf_aVerySecretToken123"


@pytest.fixture
def private(hub: Hub) -> Hub:
    hub.repositories[NAME] = Repository(model_on(hub), token=TOKEN)
    return hub


@pytest.mark.parametrize(("kind", "variable"), [("hf", "HF_TOKEN"), ("modelscope", "MODELSCOPE_API_TOKEN")])
@pytest.mark.parametrize("by_file", [True, False])
def test_a_token_opens_a_private_model(
    private: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    variable: str,
    by_file: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    assert run("model", "fetch", f"{kind}:{NAME}", tmp_path / "without")[0] == 69
    more = []
    if by_file:
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        more = ["--token-file", tmp_path / "token"]
    else:
        monkeypatch.setenv(variable, TOKEN)
    code, out = run("model", "fetch", f"{kind}:{NAME}", tmp_path / "model", *more)
    assert code == 0, out
    assert private.leaked == []
    assert not any(TOKEN in text for text in (out, caplog.text))
    written = [path.read_bytes() for path in (tmp_path / "model").iterdir()]
    assert not any(TOKEN.encode() in data or b"secret-signature" in data for data in written)


@pytest.mark.parametrize("fault", [Fault(403), Fault(503), Fault(cut=3), Fault(flip=True), Fault(page=True)])
def test_no_error_shows_a_token_or_a_signed_url(
    private: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    private.always["model-00001-of-00002.safetensors"] = fault
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model")
    assert code == 69
    assert TOKEN not in out
    assert "secret-signature" not in out
    assert not any(TOKEN.encode() in path.read_bytes() for path in (tmp_path / "model.incomplete").iterdir())


def test_a_token_that_is_none_is_not_shown(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("two words")
    code, out = run("model", "fetch", f"hf:{NAME}", tmp_path / "model", "--token-file", tmp_path / "token")
    assert code == 69
    assert "expected a token in one word" in out
    assert "two words" not in out


def test_a_password_in_a_url_is_not_shown(hub: Hub, tmp_path: Path) -> None:
    url = hub.url.replace("http://", "http://user:pa55word@") + "/plain/owner/nothing/"
    code, out = run("model", "fetch", url, tmp_path / "model")
    assert code == 69
    assert "pa55word" not in out
    good = url.replace("nothing", "model")
    assert run("model", "fetch", good, tmp_path / "model")[0] == 0
    assert not any(b"pa55word" in path.read_bytes() for path in (tmp_path / "model").iterdir())


def test_a_source_does_not_print_its_token() -> None:
    source = parse_source(f"hf:{NAME}", environ={"HF_TOKEN": TOKEN})
    assert source.token == TOKEN
    assert TOKEN not in f"{source} {source!r}"


def test_the_images_offline_switch_does_not_stop_a_fetch(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("model", "fetch", f"hf:{NAME}", tmp_path / "model")[0] == 0
