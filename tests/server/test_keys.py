import json
import os
import stat
import threading
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.errors import ConfigError
from server.keys import KeyRing, KeysUnreadableError, add_key, change_key, read_keys, revoke_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_found_by_its_text_and_the_text_is_kept_nowhere(file: Path) -> None:
    keys = {name: add_key(file, name) for name in ("ann", "bob")}
    ring = KeyRing(file)
    for name, key in keys.items():
        found = ring.find(key)
        assert found is not None
        assert found.name == name
        assert key not in file.read_text()
    for other in (
        "",
        "ann",
        keys["ann"][:-1],
        keys["ann"] + "x",
        keys["ann"].upper(),
        "\ud800",
        read_keys(file)[0].sha256,
    ):
        assert ring.find(other) is None


def test_keys_are_long_random_and_different(file: Path) -> None:
    keys = [add_key(file, f"n{index}") for index in range(20)]
    assert len(set(keys)) == 20
    assert min(len(key) for key in keys) >= 43  # 256 bits in base64


def test_the_file_is_private_and_its_folder_is_made(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "keys.json"
    add_key(file, "ann")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


def test_a_running_gateway_takes_new_keys_and_refuses_revoked_ones(file: Path) -> None:
    ann = add_key(file, "ann")
    ring = KeyRing(file)
    bob = add_key(file, "bob")
    assert ring.find(bob)
    revoke_key(file, "ann")
    assert ring.find(ann) is None
    assert ring.find(bob)


@pytest.mark.parametrize("harm", ["gone", "malformed", "open to all"])
def test_nobody_is_let_in_once_the_file_is_unusable_and_everybody_again_once_it_is_mended(
    file: Path, harm: str
) -> None:
    key = add_key(file, "ann")
    ring = KeyRing(file)
    good = file.read_bytes()
    if harm == "gone":
        file.unlink()
    elif harm == "malformed":
        file.write_text("{")
    else:
        file.chmod(0o644)
    with pytest.raises(KeysUnreadableError):
        ring.find(key)
    file.write_bytes(good)
    file.chmod(0o600)
    assert ring.find(key)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "EOF"),
        ("[]", "should be an object"),
        ('{"schema": 2, "keys": []}', "schema"),
        ('{"schema": 1, "keys": [], "extra": 1}', "extra"),
        ('{"schema": 1, "keys": [{"name": "a"}]}', "keys.0.sha256"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        KeyRing(file)


def test_a_file_open_to_others_or_missing_is_refused_with_the_remedy(file: Path) -> None:
    with pytest.raises(ConfigError, match="voltserve keys add"):
        KeyRing(file)
    add_key(file, "ann")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(file)


def test_two_keys_of_one_name_are_refused(file: Path) -> None:
    add_key(file, "ann")
    with pytest.raises(ConfigError, match="revoke it first"):
        add_key(file, "ann")
    keys = json.loads(file.read_text())
    keys["keys"] *= 2
    file.write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match="comes twice"):
        read_keys(file)


def test_revoking_an_unknown_name_says_the_nearest(file: Path) -> None:
    add_key(file, "laptop")
    with pytest.raises(ConfigError, match="did you mean laptop"):
        revoke_key(file, "latpop")


def test_writers_at_the_same_time_lose_no_key(file: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(file, f"n{index}")) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(file)} == {f"n{index}" for index in range(8)}


def test_a_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(file, "ann")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        add_key(file, "bob")
    assert [key.name for key in read_keys(file)] == ["ann"]
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


def test_the_commands_add_list_and_revoke(file: Path) -> None:
    run = CliRunner().invoke
    added = run(
        app, ["keys", "add", "ann", "--file", str(file), "--requests-per-minute", "60", "--max-concurrent", "0"]
    )
    assert added.exit_code == 0
    assert KeyRing(file).find(added.output.strip())
    listed = run(app, ["keys", "list"], env={"VOLTSERVE_KEYS_FILE": str(file)}).output
    assert listed.startswith("ann  ")
    limits = "requests per minute: 60; at once: no limit; expires: never; models: all; tokens per day: no limit"
    assert listed.endswith(f"  {limits}\n")
    assert added.output.strip() not in listed
    assert run(app, ["keys", "revoke", "ann", "--file", str(file)]).exit_code == 0
    assert read_keys(file) == ()
    for wrong in (["revoke", "ann"], ["add", "no blanks"]):
        assert run(app, ["keys", *wrong, "--file", str(file)]).exit_code == 2


def test_limits_of_shared_use_are_kept_shown_and_checked(file: Path) -> None:
    run = CliRunner().invoke
    flags = ["--expires", "2027-01-31", "--models", "a", "--models", "b/c", "--tokens-per-day", "5000"]
    assert run(app, ["keys", "add", "ann", "--file", str(file), *flags]).exit_code == 0
    (key,) = read_keys(file)
    assert (key.expires, key.models, key.tokens_per_day) == (date(2027, 1, 31), ("a", "b/c"), 5000)
    listed = run(app, ["keys", "list", "--file", str(file)]).output
    assert listed.endswith("; expires: 2027-01-31 at its end; models: a, b/c; tokens per day: 5000\n")
    for wrong in (["--expires", "soon"], ["--tokens-per-day", "0"], ["--models", ""]):
        assert run(app, ["keys", "add", "bob", "--file", str(file), *wrong]).exit_code == 2, wrong


def test_changing_limits_leaves_the_key_and_what_is_not_named(file: Path) -> None:
    run = CliRunner().invoke
    secret = add_key(file, "ann", requests_per_minute=5, models=("a",))
    add_key(file, "bob")
    (ann, bob) = read_keys(file)
    flags = ["--tokens-per-day", "5000", "--expires", "2027-01-31", "--clear", "models"]
    changed = run(app, ["keys", "change", "ann", "--file", str(file), *flags])
    assert changed.exit_code == 0, changed.output
    was, now = changed.output.splitlines()
    assert was.endswith("expires: never; models: a; tokens per day: no limit")
    assert "requests per minute: 5; at once: as serve has it; expires: 2027-01-31 at its end" in now
    assert now.endswith("; models: all; tokens per day: 5000")
    found = KeyRing(file).find(secret)
    assert found == ann.model_copy(update={"tokens_per_day": 5000, "expires": date(2027, 1, 31), "models": None})
    assert read_keys(file)[1] == bob
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_change_to_what_it_was_writes_nothing(file: Path) -> None:
    add_key(file, "ann", tokens_per_day=7)
    before = file.stat()
    same = CliRunner().invoke(app, ["keys", "change", "ann", "--file", str(file), "--tokens-per-day", "7"])
    assert same.output.endswith("tokens per day: 7  (as it was)\n")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["ann"], "nothing to change: give --requests-per-minute, --max-concurrent, --expires"),
        (["ann", "--expires", "2027-01-01", "--clear", "expires"], "--expires and --clear expires contradict"),
        (["anne", "--clear", "models"], "did you mean ann?"),
        (["ann", "--models", ""], "API key 'ann': models"),
        (["ann", "--clear", "name"], "'name' is not one of"),
        (["ann", "--tokens-per-day", "0"], "0 is not in the range"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(
    file: Path, flags: list[str], message: str
) -> None:
    add_key(file, "ann", tokens_per_day=7)
    before = file.read_bytes()
    refused = CliRunner().invoke(app, ["keys", "change", *flags, "--file", str(file)])
    assert refused.exit_code == 2
    assert message in " ".join(refused.output.split())
    assert file.read_bytes() == before


def test_changes_at_the_same_time_are_all_kept(file: Path) -> None:
    add_key(file, "ann")
    limits = {"requests_per_minute": 1, "max_concurrent": 2, "tokens_per_day": 3, "models": ("a",)}
    threads = [threading.Thread(target=change_key, args=(file, "ann"), kwargs={one: limits[one]}) for one in limits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (key,) = read_keys(file)
    assert {one: getattr(key, one) for one in limits} == limits


def test_a_key_without_the_limits_of_shared_use_is_one_that_earlier_versions_read(file: Path) -> None:
    add_key(file, "ann", requests_per_minute=5)
    (key,) = json.loads(file.read_text())["keys"]
    assert key.keys() == {"name", "sha256", "created", "requests_per_minute"}
