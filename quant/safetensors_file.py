"""Checkpoints in safetensors shards (github.com/huggingface/safetensors), read tensor by tensor and written likewise.

A shard is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.constants import INDEX_NAME
from quant.errors import QuantError
from quant.jsonfile import field, read_object, write_object
from quant.safetensors_header import read_header, unindexed_shards

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_REMEDY = (
    "Download the model again and compare its files' sizes with the source's (a Git LFS pointer is about 130 bytes)"
)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's dtype and shape by its header, and the shard (a file name) that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: str

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A directory's safetensors tensors. Headers have been read, data have not."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards' file names, sorted."""
        return tuple(sorted({info.shard for info in self.tensors.values()}))

    def names(self, shard: str) -> list[str]:
        """The tensors of `shard`, in the header's order."""
        return [name for name, info in self.tensors.items() if info.shard == shard]

    def read(self, shard: str, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each named tensor of `shard`. Only the current one is in memory."""
        with _opened(self.directory / shard) as file:
            for name in names:
                yield name, file.get_tensor(name)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of `directory`'s shards: those of the index, or the only *.safetensors file.

    Raises QuantError naming the file (and tensor) when a shard is missing or broken, or disagrees with the index.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        shards = unindexed_shards(directory)
        if len(shards) != 1:
            raise QuantError(
                f"{directory}: expected {INDEX_NAME} or one *.safetensors file, got {len(shards)} of the latter",
                _REMEDY,
            )
        return Checkpoint(directory, _read_header(directory / shards[0]))
    weight_map = field(read_object(index, _REMEDY), "weight_map", dict, str(index), _REMEDY)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise QuantError(f"{index}: {name}: expected a file name, got {shard!r}", _REMEDY)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        header = _read_header(directory / shard)
        listed = {name for name, owner in weight_map.items() if owner == shard}
        if different := sorted(listed ^ header.keys()):
            where = ("index", "shard") if different[0] in listed else ("shard", "index")
            raise QuantError(
                f"{directory / shard}: {different[0]} is in the {where[0]} but not in the {where[1]}", _REMEDY
            )
        tensors |= header
    return Checkpoint(directory, tensors)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The library's (untyped) handle of a shard. Errors name the file."""
    if not path.is_file():
        raise QuantError(f"{path} is missing", _REMEDY)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise QuantError(f"{path}: expected a safetensors file, got: {error}", _REMEDY) from None


def _read_header(path: Path) -> dict[str, TensorInfo]:
    tensors = {}
    for name, entry in read_header(path).entries.items():
        if entry.dtype not in DTYPES:
            raise QuantError(
                f"{path}: {name}: expected one of {', '.join(DTYPES)}, got {entry.dtype}",
                "This kind of checkpoint is not supported",
            )
        tensors[name] = TensorInfo(DTYPES[entry.dtype], entry.shape, path.name)
    return tensors


class ShardWriter:
    """Writes one shard, in any order of tensors, with at most one tensor in memory. Dtypes and shapes are given first.

    A context manager. A normal exit checks that every tensor was written, and raises ValueError otherwise. A tensor of
    another dtype or shape than announced is a ValueError too.
    """

    def __init__(self, path: Path, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._specs = dict(specs)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wide elements first, so that every tensor starts at a multiple of its element's size. Readers map the file.
        for name in sorted(specs, key=lambda name: (-specs[name][0].itemsize, name)):
            dtype, shape = specs[name]
            self._offsets[name] = end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [self._offsets[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._pending = set(specs)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the tensor `name`, once."""
        if name not in self._pending or (tensor.dtype, tuple(tensor.shape)) != self._specs[name]:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name}: expected {self._specs.get(name, 'no such tensor')} once, got {got}")
        self._file.seek(self._data_start + self._offsets[name])
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._pending.remove(name)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._pending:
            raise ValueError(f"expected all tensors to be written, {sorted(self._pending)[0]} was not")


def write_index(directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Writes model.safetensors.index.json for `tensors`."""
    weight_map = {name: tensors[name].shard for name in sorted(tensors)}
    total = sum(info.nbytes for info in tensors.values())
    write_object(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
