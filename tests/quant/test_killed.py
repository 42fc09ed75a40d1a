"""Runs that are killed, or stopped while they calibrate: the next one goes on, with equal bytes, and clears up."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quant import calibrate
from quant.atomic import atomic_directory
from quant.calibrate import CalibrationSettings
from quant.calibration_text import Text
from quant.errors import QuantError
from quant.methods import Method
from quant.quantize import quantize_checkpoint
from tests.quant.files import names_in
from tests.quant.tiny_model import TEXT, tiny_model

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "method": Method("quasar", compensate=True),
    "calibration": CalibrationSettings(Text(TEXT, "foxes"), windows=6, window_tokens=32),
}
# Kills itself once `what` has reached `done`, which is as abrupt as being killed.
SUICIDE = """
import os, signal, sys
from pathlib import Path
from quant.quantize import quantize_checkpoint
from tests.quant.test_killed import OPTIONS

source, out, what, done = sys.argv[1:]
def show(progress):
    if progress.what == what and progress.done >= int(done):
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint(Path(source), Path(out), on_progress=show, **OPTIONS)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture(scope="module")
def whole(source):
    quantize_checkpoint(source, source.parent / "whole", **OPTIONS)
    return contents(source.parent / "whole")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_killed_at_any_moment_it_goes_on_with_equal_bytes_and_leaves_nothing(tmp_path, source, whole):
    out = tmp_path / "out"
    for what, done in (("scanning weights", 1), ("calibrating", 3), ("quantizing", 40_000), ("writing", 30_000)):
        process = subprocess.run(
            [sys.executable, "-c", SUICIDE, str(source), str(out), what, str(done)], cwd=ROOT, check=False
        )
        assert process.returncode == -signal.SIGKILL, what
        left = names_in(tmp_path)
        # One partial folder, though each run before was killed too.
        assert len([name for name in left if name.endswith(".partial")]) == 1
        assert set(left) <= {".out.resume", *(name for name in left if name.endswith(".partial"))}

    quantize_checkpoint(source, out, **OPTIONS)

    assert names_in(tmp_path) == ["out"]
    assert contents(out) == whole


class Stopped(Exception):
    pass


def test_a_stopped_calibration_keeps_its_windows(tmp_path, source, whole, monkeypatch):
    def stop(progress):
        if progress.what == "calibrating" and progress.done >= 3:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=stop, **OPTIONS)

    again, begun = [], []
    backward = calibrate._backward

    def spy(model, window, seed):
        again.append(seed)
        backward(model, window, seed)

    monkeypatch.setattr(calibrate, "_backward", spy)
    quantize_checkpoint(
        source,
        tmp_path / "out",
        on_progress=lambda p: begun.append(p.done) if p.what == "calibrating" else None,
        **OPTIONS,
    )
    assert begun[0] >= 2
    assert len(again) == 6 - begun[0]
    assert contents(tmp_path / "out") == whole


def test_lanes_end_when_another_fails(tmp_path, source, monkeypatch):
    """Ctrl-C is such a failure, of the main thread: it does not wait for the windows that are left."""
    ran = []
    backward = calibrate._backward

    def fail_at_once(model, window, seed):
        ran.append(seed)
        if seed == 0:
            raise Stopped
        backward(model, window, seed)

    monkeypatch.setattr(calibrate, "_backward", fail_at_once)
    settings = CalibrationSettings(Text(TEXT, "foxes"), windows=40, window_tokens=32)
    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", method=Method("quasar"), calibration=settings)
    assert len(ran) < 20


def test_two_runs_of_one_destination_do_not_meet(tmp_path, source):
    def second(progress):
        if progress.what == "calibrating":
            with pytest.raises(QuantError, match=r"\.out\.resume is in use: another run is making"):
                quantize_checkpoint(source, tmp_path / "out", **OPTIONS)
            raise Stopped

    with pytest.raises(Stopped):
        quantize_checkpoint(source, tmp_path / "out", on_progress=second, **OPTIONS)


def test_only_folders_of_killed_runs_of_this_destination_are_removed(tmp_path):
    kept = [".other.abcdefgh.partial", ".out.abcdefgh.partial.bak", ".out.ABC.partial", ".out.partial"]
    for name in (*kept, ".out.abcdefgh.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".out.ijklmnop.partial").touch()  # a file is nothing of ours
    (tmp_path / ".out.qrstuvwx.partial").symlink_to(tmp_path / kept[0])

    # A run that lives is not a killed one: it ends later, and finds the destination taken.
    with pytest.raises(QuantError, match="was not written"), atomic_directory(tmp_path / "out") as running:
        with atomic_directory(tmp_path / "out") as second:
            assert running.exists()
            (second / "done").touch()
        (running / "done").touch()

    expected = {*kept, ".out.ijklmnop.partial", ".out.qrstuvwx.partial", "out"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert (tmp_path / kept[0] / "file").exists()
