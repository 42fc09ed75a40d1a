"""Safetensors headers, read strictly and without trusting them. Torch-free.

A file (github.com/huggingface/safetensors) has three parts:

    8 bytes      header length, little-endian
    header       JSON {name: {dtype, shape, data_offsets}}, with an optional `__metadata__` of strings
    data         the tensors' bytes

Only that grammar is read, from left to right, so a hostile header is refused at its first wrong byte. No length that it
claims is allocated. Memory is bounded by the header's bytes (at most the file's size, at most 100 MB) and a few hundred
bytes per entry.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quant.errors import QuantError

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
# More dimensions than any tensor has, and few enough that multiplying them is cheap.
MAX_DIMENSIONS = 16
LFS_POINTER = b"version https://git-lfs"

# Bits per element. Elements of 4 and 6 bits are packed.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

# A second copy of the weights, for Mistral's own tools. No engine here reads it.
CONSOLIDATED = "consolidated"

_DOWNLOAD = "Download the file again and compare its size with the source's"

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"')
_INTEGER = re.compile(rb"0|[1-9][0-9]{0,18}(?![0-9])")


class HeaderError(QuantError):
    """An invalid header. `tensor` is empty where no single tensor is at fault."""

    def __init__(self, path: Path, tensor: str, expected: str, got: str, remedy: str = _DOWNLOAD) -> None:
        where = f"{path}: {tensor}" if tensor else f"{path}"
        super().__init__(f"{where}: expected {expected}, got {got}", remedy)
        self.path = path
        self.tensor = tensor
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its dtype's name in the file, its shape, and its bytes start..end counted from `Header.data_start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """Entries by tensor name in the header's order, the metadata, and the file offset at which data starts."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def is_consolidated(name: str) -> bool:
    """Whether a file is a second copy of the weights, beside the shards."""
    return name.startswith(CONSOLIDATED)


def unindexed_shards(directory: Path) -> list[str]:
    """The shards of a directory without an index, by name. Consolidated files only if there are no others."""
    names = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    return [name for name in names if not is_consolidated(name)] or names


def read_header(path: Path) -> Header:
    """The header of the file `path`. Raises HeaderError, for a missing file too."""
    try:
        with path.open("rb") as file:
            return parse_header(file, path.stat().st_size, path)
    except FileNotFoundError:
        raise HeaderError(path, "", "a file", "nothing", "Download the missing file") from None
    except OSError as error:
        raise HeaderError(path, "", "a readable file", str(error)) from None


def parse_header(file: BinaryIO, size: int, path: Path) -> Header:
    """The header at the start of `file`, which holds `size` bytes; `path` is named in errors. Raises HeaderError."""
    start = file.read(8)
    if start and LFS_POINTER.startswith(start):
        raise HeaderError(
            path, "", "tensor data", f"a Git LFS pointer of {size} bytes", "Fetch the file itself with `git lfs pull`"
        )
    if start.lstrip()[:1] == b"<":
        raise HeaderError(path, "", "tensor data", "a web page: the download was refused or redirected")
    if len(start) < 8:
        raise HeaderError(path, "", "at least 8 bytes", f"{size} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise HeaderError(path, "", f"a header of at most {MAX_HEADER_BYTES} bytes", f"length {length}")
    if length > size - 8:
        raise HeaderError(path, "", f"a header of {length} bytes", f"a file of {size} bytes, which cannot hold it")
    header = _Scanner(file.read(length), path).header(8 + length)
    _check_offsets(header, size, path)
    return header


class _Scanner:
    """Reads the header's grammar from bytes, and remembers its position."""

    def __init__(self, text: bytes, path: Path) -> None:
        self._text = text
        self._path = path
        self._at = 0

    def header(self, data_start: int) -> Header:
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] | None = None
        if self._text[:1] != b"{":
            raise self._unexpected("'{' as the header's first byte")
        for name in self._members():
            if name in entries or (name == "__metadata__" and metadata is not None):
                raise HeaderError(self._path, name, "each name once", "it twice")
            if name == "__metadata__":
                metadata = self._metadata()
            else:
                entries[name] = self._entry(name)
        if self._at != len(self._text):
            raise self._unexpected("nothing after the header's object")
        return Header(entries, metadata or {}, data_start)

    def _metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = {}
        for key in self._members():
            if key in metadata:
                raise HeaderError(self._path, "__metadata__", "each key once", f"{key!r} twice")
            metadata[key] = self._string("a string")
        return metadata

    def _entry(self, name: str) -> Entry:
        dtype: str | None = None
        shape: tuple[int, ...] | None = None
        offsets: tuple[int, ...] | None = None
        for key in self._members():
            if key == "dtype" and dtype is None:
                dtype = self._string("a dtype's name")
            elif key == "shape" and shape is None:
                shape = self._integers()
            elif key == "data_offsets" and offsets is None:
                offsets = self._integers()
            else:
                raise HeaderError(self._path, name, "dtype, shape and data_offsets, once each", f"{key!r}")
        if dtype is None or shape is None or offsets is None or len(offsets) != 2:
            found = f"dtype {dtype}, shape {shape}, data_offsets {offsets}"
            raise HeaderError(self._path, name, "dtype, shape and two data_offsets", found)
        if dtype not in DTYPE_BITS:
            raise HeaderError(self._path, name, f"a dtype of {', '.join(DTYPE_BITS)}", repr(dtype))
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits % 8 or offsets[1] - offsets[0] != bits // 8:
            expected = f"{bits / 8:g} bytes for {dtype} {list(shape)}"
            raise HeaderError(self._path, name, expected, f"data_offsets {list(offsets)}")
        return Entry(dtype, shape, *offsets)

    def _members(self) -> Iterator[str]:
        """Yields an object's member names. The caller reads each value before it takes the next name."""
        self._expect(b"{")
        if self._take(b"}"):
            return
        while True:
            name = self._string("a name")
            self._expect(b":")
            yield name
            if self._take(b"}"):
                return
            self._expect(b",")

    def _take(self, token: bytes) -> bool:
        """Whether `token` is next, apart from white space. If so, moves past it and the white space after it."""
        self._skip_space()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        self._skip_space()
        return True

    def _expect(self, token: bytes) -> None:
        if not self._take(token):
            raise self._unexpected(repr(token.decode()))

    def _string(self, what: str) -> str:
        match = _STRING.match(self._text, self._at)
        if not match:
            raise self._unexpected(what)
        try:
            # json.loads only for escapes: it is slow on tokens.
            text: str = json.loads(match[0]) if b"\\" in match[0] else match[0][1:-1].decode()
            text.encode()  # raises for a lone surrogate
        except ValueError:
            raise self._unexpected("valid UTF-8 text") from None
        self._at = match.end()
        return text

    def _integers(self) -> tuple[int, ...]:
        numbers: list[int] = []
        self._expect(b"[")
        if self._take(b"]"):
            return ()
        while True:
            match = _INTEGER.match(self._text, self._at)
            if not match or len(numbers) == MAX_DIMENSIONS:
                raise self._unexpected(f"at most {MAX_DIMENSIONS} non-negative integers")
            numbers.append(int(match[0]))
            self._at = match.end()
            if self._take(b"]"):
                return tuple(numbers)
            self._expect(b",")

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _unexpected(self, expected: str) -> HeaderError:
        got = repr(self._text[self._at : self._at + 20])[1:] if self._at < len(self._text) else "its end"
        return HeaderError(self._path, "", f"{expected} at header byte {self._at}", got)


def _check_offsets(header: Header, size: int, path: Path) -> None:
    """The tensors' bytes must follow each other without a gap and end where the file does."""
    end = 0
    for name, entry in sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "an overlap" if entry.start < end else "a gap"
            raise HeaderError(path, name, f"data from offset {end}", f"{what}: it starts at {entry.start}")
        end = entry.end
    data = size - header.data_start
    if data != end:
        what = f"{end - data} bytes less" if data < end else f"{data - end} bytes more"
        raise HeaderError(path, "", f"a file of {header.data_start + end} bytes", f"{size}, {what}")
