"""What quantizing takes, known before any weight is read."""

import re
import shutil
from collections import namedtuple

import pytest
import torch

from quant import estimate as estimating
from quant.calibrate import CalibrationSettings
from quant.calibration_text import Text
from quant.errors import QuantError
from quant.methods import Method
from quant.progress import Progress
from quant.quantize import quantize_checkpoint, run
from quant.task import prepare
from tests.quant.files import names_in
from tests.quant.tiny_model import TEXT, tiny_model

SETTINGS = CalibrationSettings(Text(TEXT, "foxes"), windows=5, window_tokens=32)
METHODS = [Method("mse"), Method("quasar"), Method("quasar", compensate=True)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "source")


def task(source, method):
    return prepare(source, method=method, calibration=SETTINGS if method.calibrates else None)


def test_better_methods_take_more_of_everything(source):
    found = [task(source, method).estimate for method in METHODS]
    for what in ("memory", "disk"):
        sizes = [getattr(one, what) for one in found]
        assert sizes == sorted(sizes), what
    operations = [
        estimating._operations([(4096, 4096)], 4096**2, method, 512 if method.calibrates else 0) for method in METHODS
    ]
    assert operations == sorted(operations)
    assert all(0 < one.seconds[0] < one.seconds[1] for one in found)


def test_the_output_is_as_large_as_estimated(tmp_path, source):
    expected = task(source, Method("mse")).estimate.output_bytes
    assert quantize_checkpoint(source, tmp_path / "out").output_bytes == expected


@pytest.mark.parametrize(
    ("method", "between", "remedy"),
    [
        (METHODS[2], 1, r"this fits: --method quasar \(\S+ GB\) or --method mse"),
        (METHODS[2], 0, r"this fits: --method mse \(\S+ GB\)$"),
        (METHODS[1], 0, r"this fits: --method mse"),
        (METHODS[0], -1, "Use a machine with more"),
    ],
)
def test_too_little_memory_is_told_before_any_weight_is_read_with_what_fits(
    tmp_path, source, monkeypatch, method, between, remedy
):
    sizes = [task(source, one).estimate.memory for one in METHODS]
    free = (sizes[between] + 1) if between >= 0 else 1000
    monkeypatch.setattr(estimating, "available_memory", lambda: free)
    progress: list[Progress] = []
    with pytest.raises(QuantError, match=f"of free memory for {method.flags}, got") as error:
        run(task(source, method), tmp_path / "out", progress.append)
    assert re.search(remedy, error.value.remedy)
    assert not progress
    assert names_in(tmp_path) == []


def test_too_little_disk_is_told_before_any_weight_is_read(tmp_path, source, monkeypatch):
    usage = namedtuple("usage", "total used free")
    asked = []

    def full(path):
        asked.append(path)
        return usage(1, 1, 0)

    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(QuantError, match=r"out: expected \S+ GB of free disk"):
        quantize_checkpoint(source, tmp_path / "not" / "there" / "out")
    assert asked == [tmp_path]


def test_torch_keeps_its_threads(source):
    threads = torch.get_num_threads()
    task(source, Method("mse"))
    assert torch.get_num_threads() == threads
