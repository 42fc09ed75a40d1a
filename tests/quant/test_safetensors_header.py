import io
import json
import struct
import tracemalloc
from pathlib import Path

import pytest

from quant.errors import QuantError
from quant.safetensors_header import MAX_HEADER_BYTES, Entry, Header, HeaderError, parse_header, read_header
from tests.quant.checkpoints import safetensors_bytes
from tests.quant.hostile_headers import check_header, hostile_file

SAMPLE = {"a.weight": ("U8", [2, 3], bytes(6)), "b": ("F32", [], bytes(4)), "empty": ("BF16", [0, 4], b"")}


def parse(raw: bytes) -> Header:
    return parse_header(io.BytesIO(raw), len(raw), Path("model.safetensors"))


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = '"U8"', shape: str = "[1]", offsets: str = "[0,1]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def test_a_header_is_read_with_offsets_from_the_data_s_start():
    raw = safetensors_bytes(SAMPLE)

    header = parse(raw)

    assert header.entries == {
        "a.weight": Entry("U8", (2, 3), 0, 6),
        "b": Entry("F32", (), 6, 10),
        "empty": Entry("BF16", (0, 4), 10, 10),
    }
    assert header.data_start == len(raw) - 10


def test_white_space_escapes_and_metadata_are_read():
    text = ' \n"__metadata__" : { "format" : "pt" , "x" : "" } , "\\u4f60\\n" : ' + entry() + " } \t "

    header = parse(with_header(b"{" + text.encode(), b"\0"))

    assert header.metadata == {"format": "pt", "x": ""}
    assert list(header.entries) == ["你\n"]


def test_an_empty_object_is_a_header_without_tensors():
    assert parse(with_header(b"{}")).entries == {}


def test_a_file_is_read_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(SAMPLE))

    assert len(read_header(tmp_path / "model.safetensors").entries) == 3
    with pytest.raises(HeaderError, match=r"other\.safetensors: expected a file, got nothing\. Download the missing"):
        read_header(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "'{' as the header's first byte at header byte 0, got its end"),
        (b" {}", "'{' as the header's first byte at header byte 0"),
        (b"[]", "'{' as the header's first byte at header byte 0"),
        (b"{}x", "nothing after the header's object at header byte 2, got 'x'"),
        (b"{}\0\0", "nothing after the header's object at header byte 2"),
        (b'{"a"', r"':' at header byte 4, got its end"),
        (b"{a:1}", "a name at header byte 1, got 'a:1}'"),
        (b'{"a":' + entry().encode() + b",}", "a name at header byte"),
        (b'{"a":1}', r"'\{' at header byte 5, got '1\}'"),
        (b'{"a":' + b"[" * 10_000, r"'\{' at header byte 5, got '\[\[\["),
        (b'{"a":' * 10_000, "a: expected dtype, shape and data_offsets, once each, got 'a'"),
        (b'{"a\xff":', "valid UTF-8 text at header byte 1"),
        (b'{"\\ud800":' + entry().encode() + b"}", "valid UTF-8 text at header byte 1"),
        (b'{"\\x":', "valid UTF-8 text at header byte 1"),
        (b'{"a\n":', "a name at header byte 1"),
        (f'{{"a":{entry()},"a":{entry()}}}'.encode(), "a: expected each name once, got it twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', "__metadata__: expected each name once, got it twice"),
        (b'{"__metadata__":{"k":"v","k":"v"}}', "__metadata__: expected each key once, got 'k' twice"),
        (b'{"__metadata__":{"k":1}}', "a string at header byte 21, got '1}}'"),
        (b'{"a":{}}', "a: expected dtype, shape and two data_offsets, got dtype None, shape None, data_offsets None"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', "a: expected dtype, shape and data_offsets, once each, got 'dtype'"),
        (b'{"a":{"other":1}}', "a: expected dtype, shape and data_offsets, once each, got 'other'"),
        (f'{{"a":{entry(dtype="8")}}}'.encode(), "a dtype's name at header byte 14, got '8,"),
        (f'{{"a":{entry(dtype=chr(34) + "U7" + chr(34))}}}'.encode(), "a: expected a dtype of F64, .*, got 'U7'"),
        (f'{{"a":{entry(shape="[-1]")}}}'.encode(), "non-negative integers at header byte 28, got '-1]"),
        (f'{{"a":{entry(shape="[1.0]")}}}'.encode(), "']' at|',' at header byte 29, got '.0]"),
        (f'{{"a":{entry(shape="[1e3]")}}}'.encode(), "',' at header byte 29, got 'e3]"),
        (f'{{"a":{entry(shape="[01]")}}}'.encode(), "',' at header byte 29, got '1]"),
        (f'{{"a":{entry(shape="[true]")}}}'.encode(), "non-negative integers at header byte 28, got 'true]"),
        (f'{{"a":{entry(shape="[[1]]")}}}'.encode(), "non-negative integers at header byte 28"),
        (f'{{"a":{entry(shape=f"[{10**19}]")}}}'.encode(), "non-negative integers at header byte 28"),
        (f'{{"a":{entry(shape=str([1] * 17))}}}'.encode(), "at most 16 non-negative integers"),
        (
            f'{{"a":{entry(offsets="[0]")}}}'.encode(),
            r"two data_offsets, got dtype U8, shape \(1,\), data_offsets \(0,\)",
        ),
        (f'{{"a":{entry(offsets="[0,1,2]")}}}'.encode(), "two data_offsets"),
        (f'{{"a":{entry(offsets="[1,0]")}}}'.encode(), r"a: expected 1 bytes for U8 \[1\], got data_offsets \[1, 0\]"),
        (f'{{"a":{entry(shape=str([10**18] * 16))}}}'.encode(), "a: expected 1e.* bytes for U8"),
        (b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', r"a: expected 1\.5 bytes for F4 \[3\]"),
        (f'{{"a":{entry(offsets="[1,2]")}}}'.encode(), "a: expected data from offset 0, got a gap: it starts at 1"),
        (f'{{"a":{entry()},"b":{entry()}}}'.encode(), "b: expected data from offset 1, got an overlap: it starts at 0"),
        (f'{{"a":{entry(shape="[9]", offsets="[0,9]")}}}'.encode(), "a file of .* bytes, got .*, 8 bytes less"),
        (b"{}", "a file of 10 bytes, got 11, 1 bytes more"),
    ],
)
def test_a_hostile_header_is_refused_at_its_first_wrong_byte(text, message):
    with pytest.raises(HeaderError, match=message):
        parse(with_header(text, b"\0"))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 62, (1 << 64) - 1])
def test_a_claimed_length_is_not_allocated(length):
    raw = struct.pack("<Q", length) + b"{}"
    tracemalloc.start()
    with pytest.raises(HeaderError, match=f"a header of at most {MAX_HEADER_BYTES} bytes, got length {length}"):
        parse(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 50_000


def test_a_length_beyond_the_file_s_end_is_named():
    with pytest.raises(HeaderError, match="a header of 1000 bytes, got a file of 10 bytes, which cannot hold it"):
        parse(struct.pack("<Q", 1000) + b"{}")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "at least 8 bytes, got 0 bytes"),
        (b"1234567", "at least 8 bytes, got 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer of 43 bytes. Fetch the file itself"),
        (b"<html>", "a web page: the download was refused"),
        (b"\n<!DOCTYPE html>", "a web page"),
    ],
)
def test_what_is_often_downloaded_instead_is_named(raw, message):
    with pytest.raises(HeaderError, match=message):
        parse(raw)


def test_no_input_crashes_the_reader_or_makes_it_allocate_beyond_the_file():
    accepted = sum(check_header(hostile_file(number)) for number in range(5000))

    assert 300 < accepted < 4700, "both kinds are among the inputs"


def test_what_the_reader_accepts_is_what_json_says():
    raw = safetensors_bytes(SAMPLE)
    (length,) = struct.unpack("<Q", raw[:8])

    for name, fields in json.loads(raw[8 : 8 + length]).items():
        got = parse(raw).entries[name]
        assert (got.dtype, list(got.shape), [got.start, got.end]) == tuple(fields.values())


def test_errors_are_those_that_users_see():
    assert issubclass(HeaderError, QuantError)
