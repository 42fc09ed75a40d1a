"""The structs of the CUDA kernels' C interface for ctypes, read from the headers that declare them.

`kernels/cuda/*/args.h` and `plan.h` are the only place where a struct is written down. A library states the headers it
was compiled with (`voltserve_headers`, scripts/build_cuda.sh). One of other headers would read arguments at wrong
addresses, so native.py refuses it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

CUDA = Path(__file__).resolve().parents[1] / "cuda"
_NUMBERS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
}
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELDS = re.compile(r"(?:const )?(?:struct )?((?:unsigned )?\w+) (.+)")
_FIELD = re.compile(r"(\*?)(?:const )?(\w+)(?:\[(\w+)\])?")


def headers() -> list[Path]:
    """The headers whose structs cross the interface, in the order of their names."""
    return sorted([*CUDA.glob("*/args.h"), *CUDA.glob("*/plan.h")])


def digest() -> str:
    """sha256 of all headers, one after another, as `cat … | sha256sum` writes it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in headers())).hexdigest()


def struct(name: str) -> type[ctypes.Structure]:
    """The struct of this name in namespace voltserve. Raises KeyError for an unknown name."""
    return structs()[name]


def filled(name: str, **fields: Any) -> ctypes.Structure:
    """The struct with all of its fields; a tensor stands for its address, None for a null pointer.

    Raises TypeError where a field is missing, or is none of the struct's.
    """
    made = struct(name)
    expected = [field for field, *_ in made._fields_]
    if fields.keys() != set(expected):
        raise TypeError(f"{name}: expected {', '.join(expected)}; got {', '.join(fields)}")
    return made(**{field: value.data_ptr() if hasattr(value, "data_ptr") else value for field, value in fields.items()})


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """All of them, by name. Raises ValueError for a declaration that this reader does not understand."""
    text = re.sub(r"//.*", "", "".join(path.read_text() for path in headers()))
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    enums = dict.fromkeys(re.findall(r"enum class (\w+)", text), ctypes.c_int)
    bodies = {name: body.split("VOLTSERVE_BOTH")[0] for name, body in _STRUCT.findall(text)}  # fields come first
    found: dict[str, Any] = {}

    def read(name: str) -> type[ctypes.Structure]:
        if name not in found:
            fields = [field for line in bodies[name].split(";") if line.strip() for field in read_fields(name, line)]
            found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        made: type[ctypes.Structure] = found[name]
        return made

    def read_fields(name: str, line: str) -> list[tuple[str, Any]]:
        declared = _FIELDS.fullmatch(" ".join(line.split()))
        fields = [_FIELD.fullmatch(field.strip()) for field in declared[2].split(",")] if declared else [None]
        made = []
        for field in fields:
            if declared is None or field is None:
                raise ValueError(f"{name}: expected `type field, …;`, got `{line.strip()}`")
            pointer, field_name, count = field.groups()
            kind = ctypes.c_void_p if pointer else enums.get(declared[1]) or _NUMBERS.get(declared[1])
            if pointer and declared[1] == "char":
                kind = ctypes.c_char_p
            kind = kind or read(declared[1])
            made.append((field_name, kind * constants[count] if count else kind))
        return made

    return {name: read(name) for name in bodies}
