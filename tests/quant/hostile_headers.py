"""Hostile safetensors files, and what the header reader owes for each. `tests/faults/fuzz_headers.py` runs many."""

import io
import json
import struct
import tracemalloc
from pathlib import Path
from random import Random

import safetensors

from quant.safetensors_header import HeaderError, parse_header

# The memory that parsing may hold at once: the header's bytes, and a name, an entry and their containers per entry. The
# shortest possible entry has about 50 bytes.
BYTES_PER_BYTE = 32
FIXED_BYTES = 64_000

NAMES = ("a", "b", "__metadata__", "model.layers.0.mlp.up_proj.weight", "", "你好", "\ud800", "\x00")
DTYPES = ("U8", "F8_E4M3", "F32", "BF16", "F4", "BOOL", "C64", "f32", "", "F128", 8, None)
NUMBERS = (0, 1, 2, 3, 4, 64, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 1.5, True, None, "1")
TOKENS = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\xff", b"0", b" ", b"\0", b"-", b"{" * 50, b"[" * 5000)
WIDTHS = {"U8": 1, "F32": 4, "BF16": 2, "F8_E4M3": 1}


def hostile_file(seed: int) -> bytes:
    """The file of that number: noise, JSON of some shape, or a good header; often damaged, or with a wrong length."""
    random = Random(seed)  # noqa: S311 - the same inputs every time are wanted
    size = random.randrange(64)
    kind = random.choice(("noise", "json", "fields", "good", "good", "good"))
    if kind == "noise":
        text = random.randbytes(random.randrange(200))
    elif kind == "json":
        text = _json({random.choice(NAMES): _anything(random, 4) for _ in range(random.randrange(4))})
    elif kind == "fields":
        text = _json({random.choice(NAMES): _fields(random) for _ in range(random.randrange(4))})
    else:
        entries, end = _consistent_entries(random)
        size = max(0, end + random.choice((0, 0, 0, 0, -1, 1, 2)))
        text = json.dumps(entries, ensure_ascii=random.random() < 0.5).encode()
    if random.random() < 0.5:
        text = _damaged(random, text)
    length = random.choice([len(text)] * 12 + [max(0, len(text) - 1), len(text) + 1, 0, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", length) + text + bytes(size)


def _json(data: object) -> bytes:
    return json.dumps(data).encode()


def _fields(random: Random) -> dict[str, object]:
    fields = {"dtype": random.choice(DTYPES), "shape": _numbers(random), "data_offsets": _numbers(random)}
    return {name: fields[name] for name in random.sample(sorted(fields), random.choice((2, 3, 3, 3)))}


def _numbers(random: Random) -> list[object]:
    return [random.choice(NUMBERS) for _ in range(random.randrange(4))]


def _anything(random: Random, depth: int) -> object:
    kind = random.randrange(4 if depth else 2)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind == 1:
        return random.choice(NAMES)
    if kind == 2:
        return [_anything(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(NAMES): _anything(random, depth - 1) for _ in range(random.randrange(4))}


def _consistent_entries(random: Random) -> tuple[dict[str, object], int]:
    """Entries that follow each other, as a good file has them, and where their data ends."""
    entries: dict[str, object] = {}
    end = 0
    for name in random.sample([name for name in NAMES if name not in ("__metadata__", "\ud800")], random.randrange(5)):
        dtype = random.choice(sorted(WIDTHS))
        shape = [random.randrange(5) for _ in range(random.randrange(4))]
        size = WIDTHS[dtype]
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    if random.random() < 0.3:
        entries["__metadata__"] = {"format": "pt"}
    return entries, end


def _damaged(random: Random, text: bytes) -> bytes:
    """Bytes replaced, inserted, removed or repeated in one to three places."""
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(text) + 1)
        new = random.choice(TOKENS) if random.random() < 0.7 else text[at : at + 20] * 2
        text = text[:at] + new + text[at + random.randrange(4) :]
    return text


def check_header(raw: bytes) -> bool:
    """Reads `raw`; returns whether it was accepted.

    It fails for any error but HeaderError, and for more memory than the file's size explains. It also fails for a file
    that is accepted here but not by the safetensors library.
    """
    tracemalloc.start()
    try:
        header = parse_header(io.BytesIO(raw), len(raw), Path("model.safetensors"))
    except HeaderError as error:
        assert error.expected
        assert error.got
        assert error.remedy
        header = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= FIXED_BYTES + BYTES_PER_BYTE * len(raw), f"{peak} bytes for a file of {len(raw)}"
    if header is not None:
        theirs = dict(safetensors.deserialize(raw))
        assert theirs.keys() == header.entries.keys()
        for name, entry in header.entries.items():
            assert (theirs[name]["dtype"], tuple(theirs[name]["shape"])) == (entry.dtype, entry.shape)
            assert len(theirs[name]["data"]) == entry.end - entry.start
    return header is not None
