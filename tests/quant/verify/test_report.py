import hashlib
import subprocess
from typing import Any

import pytest

from quant.errors import QuantError
from quant.progress import Progress
from quant.verify import verify
from tests.quant.checkpoints import write_model


def test_a_manifest_is_written_as_sha256sum_reads_it_and_then_checked(tmp_path):
    model = write_model(tmp_path / "model")

    assert verify(model, manifest="write").ok

    lines = (model / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}
    del files["SHA256SUMS"]
    assert listed == files
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=model, check=False).returncode == 0
    assert verify(model).hashed == len(files)


def test_a_manifest_with_upper_case_and_binary_marks_is_read(tmp_path):
    model = write_model(tmp_path / "model")
    digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest().upper()
    (model / "SHA256SUMS").write_text(f"{digest} *config.json\n")

    report = verify(model)

    assert report.ok
    assert report.hashed == 1


def test_a_changed_small_file_is_found_too(tmp_path):
    model = write_model(tmp_path / "model")
    verify(model, manifest="write")
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')

    (finding,) = verify(model).findings

    assert (finding.check, finding.file) == ("sha256", "tokenizer.json")


def test_no_manifest_is_written_for_a_broken_model(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()

    assert not verify(model, manifest="write").ok
    assert not (model / "SHA256SUMS").exists()


def test_progress_counts_every_byte_of_the_shards(tmp_path):
    model = write_model(tmp_path / "model")
    seen: list[Progress] = []

    verify(model, on_progress=seen.append)

    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (total, total, "bytes")


def test_the_report_is_plain_data(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()

    data: dict[str, Any] = verify(model).as_dict()

    assert (data["ok"], data["format"], data["linears"]) == (False, "compressed-tensors", 14)
    assert data["tensor_parallel"]["2"] == []
    assert data["findings"][0].keys() == {"severity", "check", "file", "tensor", "expected", "got", "remedy"}


@pytest.mark.parametrize(("name", "got"), [("none", "nothing"), ("file", "a file")])
def test_what_is_no_directory_is_refused(tmp_path, name, got):
    (tmp_path / "file").touch()

    with pytest.raises(QuantError, match=rf"{name}: expected a directory, got {got}"):
        verify(tmp_path / name)


def test_writing_a_manifest_needs_every_byte(tmp_path):
    with pytest.raises(ValueError, match="expected depth 'full'"):
        verify(tmp_path, "headers", manifest="write")
