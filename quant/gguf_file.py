"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian: metadata and tensor infos.

The locked release of the `gguf` package does not know tensor type 40 (NVFP4), so files are read here. Every count and
length is checked against the bytes that are left, before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from quant.errors import QuantError
from quant.formats.gguf_nvfp4 import BLOCK, BLOCK_BYTES, TENSOR_TYPE

_REMEDY = "Download the GGUF file again and compare its size with the source's"
_MOST_DIMENSIONS = 4
# Value types: the numbers' codes for `struct` and numpy; 7 is bool, 8 string, 9 array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its type's number, its shape (slowest dimension first, unlike in GGUF), and its bytes.

    `data`: uint8 [rows, bytes of a row], mapped from the file.
    """

    type: int
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values, by the `gguf` package. NotImplementedError for types that it cannot decode, such as NVFP4."""
        if self.type == TENSOR_TYPE:
            raise NotImplementedError("NVFP4: see quant/formats/gguf_nvfp4.py")
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType(self.type))
        return values.reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """`fields`: the metadata; arrays of numbers are lists. `tensors` by name."""

    fields: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Reads metadata and infos, and maps the data. Raises QuantError naming the file and the tensor at fault."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise QuantError(f"{path}: expected a GGUF file, got {error}", _REMEDY) from None
    reader = _Reader(raw, path)
    if bytes(raw[:4]) != b"GGUF":
        raise QuantError(f"{path}: expected a GGUF file, got one that starts with {bytes(raw[:4])!r}", _REMEDY)
    reader.at = 4
    if (version := reader.number("I")) not in (2, 3):
        raise QuantError(f"{path}: expected GGUF version 2 or 3, got {version}", _REMEDY)
    tensor_count, field_count = int(reader.number("Q")), int(reader.number("Q"))
    fields: dict[str, object] = {}
    for _ in range(reader.count(field_count, 12)):
        key = reader.string()
        if key in fields:
            raise QuantError(f"{path}: {key}: expected each key once, got it twice", _REMEDY)
        fields[key] = reader.value(int(reader.number("I")))
    infos = [reader.info() for _ in range(reader.count(tensor_count, 24))]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise QuantError(f"{path}: general.alignment: expected a power of two from 8, got {alignment}", _REMEDY)
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise QuantError(f"{path}: {name}: expected each tensor once, got it twice", _REMEDY)
        rows = int(np.prod(shape[:-1], dtype=object)) if shape else 1
        row_bytes = _row_bytes(shape[-1] if shape else 1, kind, f"{path}: {name}")
        begin, end = start + offset, start + offset + rows * row_bytes
        if offset % alignment or end > len(raw):
            raise QuantError(f"{path}: {name}: expected bytes {begin} to {end}, got a file of {len(raw)}", _REMEDY)
        tensors[name] = GgufTensor(kind, shape, raw[begin:end].reshape(rows, row_bytes))
    return GgufFile(fields, tensors)


def _row_bytes(columns: int, kind: int, where: str) -> int:
    sizes: dict[int, tuple[int, int]] = {number.value: size for number, size in gguf.GGML_QUANT_SIZES.items()}
    sizes[TENSOR_TYPE] = (BLOCK, BLOCK_BYTES)
    if kind not in sizes:
        raise QuantError(
            f"{where}: expected a known tensor type, got {kind}", "Choose another quantization of the model"
        )
    block, size = sizes[kind]
    if columns % block:
        raise QuantError(f"{where}: expected rows of a multiple of {block} elements, got {columns}", _REMEDY)
    return columns // block * size


class _Reader:
    """Reads values one after another, never beyond the file's end."""

    def __init__(self, raw: npt.NDArray[np.uint8], path: Path) -> None:
        self._raw = raw
        self._path = path
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._raw) - self.at:
            got = f"one of {len(self._raw)} bytes, which ends within {size} bytes at {self.at}"
            raise QuantError(f"{self._path}: expected a GGUF file, got {got}", _REMEDY)
        self.at += size
        return self._raw[self.at - size : self.at].tobytes()

    def number(self, code: str) -> int | float:
        value: int | float = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]
        return value

    def count(self, number: int, size: int) -> int:
        """`number`, if that many items of at least `size` bytes can follow."""
        if number * size > len(self._raw) - self.at:
            got = f"one of {len(self._raw)} bytes, which cannot hold {number} entries at {self.at}"
            raise QuantError(f"{self._path}: expected a GGUF file, got {got}", _REMEDY)
        return number

    def string(self) -> str:
        try:
            return self.take(int(self.number("Q"))).decode()
        except UnicodeDecodeError as error:
            raise QuantError(f"{self._path}: expected UTF-8 text before byte {self.at}, got {error}", _REMEDY) from None

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return bool(self.number("B"))
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise QuantError(f"{self._path}: expected a known value type at {self.at}, got {kind}", _REMEDY)
        inner, length = int(self.number("I")), int(self.number("Q"))
        if inner == _ARRAY:
            raise QuantError(f"{self._path}: expected no arrays of arrays at {self.at}, got one", _REMEDY)
        code = "B" if inner == _BOOL else _NUMBERS.get(inner)
        if code:
            values = np.frombuffer(self.take(length * struct.calcsize(code)), dtype=f"<{code}").tolist()
            return [bool(value) for value in values] if inner == _BOOL else values
        return [self.value(inner) for _ in range(self.count(length, 8))]

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and offset."""
        name = self.string()
        dimensions = int(self.number("I"))
        if dimensions > _MOST_DIMENSIONS:
            expected = f"at most {_MOST_DIMENSIONS} dimensions"
            raise QuantError(f"{self._path}: {name}: expected {expected}, got {dimensions}", _REMEDY)
        shape = tuple(int(self.number("Q")) for _ in range(dimensions))
        return name, shape[::-1], int(self.number("I")), int(self.number("Q"))
