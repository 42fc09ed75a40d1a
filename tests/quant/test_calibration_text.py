"""Files to calibrate and measure on: text, and JSONL of texts or chats; nothing is taken with its braces."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quant.calibration_text import calibration_text, evaluation_text
from quant.errors import QuantError
from tests.quant.tiny_model import tiny_model

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tiny_model(tmp_path_factory.mktemp("tiny") / "source")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def write(tmp_path: Path, *lines: object, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("read", [calibration_text, evaluation_text])
@pytest.mark.parametrize("name", ["data.jsonl", "data.txt", "data"])
def test_objects_are_read_as_their_texts_whatever_the_file_is_called(tmp_path, model, read, name):
    path = write(tmp_path, {"text": "one\ntwo", "id": 3}, "", {"messages": CHAT}, name=name)

    assert read(path, model).content == "one\ntwo\n\n<user>hi<assistant>hello"


def test_plain_text_stays_as_it_is(tmp_path):
    for text in ("words {braces}\n", "[1] a footnote", "[1]\na footnote", '"quoted"', "\n\n  indented"):
        path = write(tmp_path, text, name="a.txt")
        assert calibration_text(path).content == text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['{"prompt": "a", "completion": "b"}'],
            r"line 1: expected a string `text`, or `messages` with roles, got 'prompt', 'c",
        ),
        ([{"text": "a"}, {"text": 5}], r"line 2: expected a string `text`"),
        ([{"text": "a"}, "words"], r"line 2: expected a JSON object, got 'words'"),
        (["[", '{"text": "a"}', "]"], r"line 1: expected a JSON object, got '\['"),
        (["{", '"text": "a"', "}"], r"line 1: expected a JSON object, got '{'"),
        ([{"text": "a"}, {"messages": [{"role": "tool", "content": "x"}]}], r"line 2: expected messages that.*no tool"),
        ([{"messages": [1]}], "line 1: expected a string `text`, or `messages` with roles, got 'messages'"),
        ([{"messages": []}], "line 1: expected a string"),
        ([{"text": " "}], "got objects without any"),
    ],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_other_json_is_refused_with_the_line_and_what_is_supported(tmp_path, model, lines, message, name):
    with pytest.raises(QuantError, match=message) as error:
        calibration_text(write(tmp_path, *lines, name=name), model)
    assert '{"text": "…"}' in str(error.value) or "without any" in message


def test_chats_without_a_template_are_refused(tmp_path):
    path = write(tmp_path, {"messages": CHAT})
    with pytest.raises(QuantError, match="chats need a model directory"):
        evaluation_text(path)
    plain = tiny_model(tmp_path / "plain")
    with pytest.raises(QuantError, match=r"chats need a chat template, and .*plain has none"):
        calibration_text(path, plain)


def test_other_files_are_refused_with_what_is_supported(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(QuantError, match=r"expected a text file in UTF-8.*JSONL"):
        calibration_text(path)
