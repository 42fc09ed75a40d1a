"""One pass over the files' bytes: digests, NaN or negative scales, NaN weights, tensors of zeros. Numpy, no torch."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quant.formats import fp8
from quant.progress import OnProgress, Progress
from quant.safetensors_header import Entry, Header
from quant.verify.findings import Finding, error, warning
from quant.verify.layers import Modules

# A multiple of every element's size.
CHUNK_BYTES = 4 << 20
MOST_FILES_AT_ONCE = 4

_AGAIN = "Download the file again; if its source holds the same values, the model is damaged"
_ODD = "Ask the model's maker: a weight that is all zero adds nothing, and is rarely meant"


@dataclass(frozen=True)
class Bits:
    """A dtype's bit patterns: an unsigned numpy type, all bits except the sign, and the bits set in NaN and Inf.

    not_finite 0: the dtype has neither. E4M3 has no Inf, and its NaN has all bits set. Bytes hold two 4-bit elements.
    """

    element: str
    magnitude: int
    not_finite: int


BITS: Mapping[str, Bits] = {
    "F64": Bits("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": Bits("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": Bits("<u2", 0x7FFF, 0x7C00),
    "BF16": Bits("<u2", 0x7FFF, 0x7F80),
    "F8_E4M3": Bits("u1", 0x7F, 0x7F),
    "F8_E5M2": Bits("u1", 0x7F, 0x7C),
    "U8": Bits("u1", 0x77, 0),
}


@dataclass
class Scan:
    """The results: digests by file, tensors whose elements are all 0 or -0, and the first NaN of each tensor."""

    digests: dict[str, str] = field(default_factory=dict)
    all_zero: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)


def scan_files(
    directory: Path, names: Iterable[str], headers: Mapping[str, Header], *, hashed: bool, on_progress: OnProgress
) -> Scan:
    """Reads every named file once, front to back. Tensors are examined in files with a header.

    One thread per file. Digests and numpy release the interpreter lock, so the disk is the limit, not one core.
    """
    names = list(names)
    total = sum((directory / name).stat().st_size for name in names)
    done = 0
    lock = threading.Lock()

    def advance(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            on_progress(Progress("reading", done, total, "bytes"))

    with ThreadPoolExecutor(min(MOST_FILES_AT_ONCE, os.cpu_count() or 1)) as pool:
        scans = list(pool.map(lambda name: _scan_file(directory / name, headers.get(name), hashed, advance), names))
    whole = Scan()
    for scan in scans:
        whole.digests |= scan.digests
        whole.all_zero |= scan.all_zero
        whole.findings += scan.findings
    return whole


def _scan_file(path: Path, header: Header | None, hashed: bool, advance: Callable[[int], None]) -> Scan:
    scan = Scan()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for tensor, entry, length in _regions(header):
            current = _TensorScan(entry, _is_fp8_scale(tensor, entry)) if entry else None
            left = length
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
                if hashed:
                    digest.update(chunk)
                if current:
                    current.add(chunk)
                advance(len(chunk))
            if current:
                _report(path.name, tensor, current, scan)
    if hashed:
        scan.digests[path.name] = digest.hexdigest()
    return scan


def _regions(header: Header | None) -> Iterator[tuple[str, Entry | None, int]]:
    """(tensor, entry, length) of a file's parts in order. The last part ends with the file."""
    if header:
        yield "", None, header.data_start
        for name, entry in sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].end)):
            yield name, entry if entry.dtype in BITS else None, entry.end - entry.start
    yield "", None, 1 << 63


class _TensorScan:
    """Examines a tensor's bytes as they arrive."""

    def __init__(self, entry: Entry, is_positive: bool) -> None:
        """`is_positive`: negative elements are to be found."""
        self.entry = entry
        self.is_positive = is_positive
        self.any_negative = False
        self.all_zero = True
        self.first_not_finite: int | None = None
        self._bits = BITS[entry.dtype]
        self._seen = 0

    def add(self, chunk: bytes) -> None:
        """Examines the next bytes. They are whole elements, since the header was checked against the file."""
        elements = np.frombuffer(chunk, dtype=self._bits.element)
        mask = elements.dtype.type(self._bits.not_finite)
        if mask and self.first_not_finite is None:
            wrong = (elements & mask) == mask
            if wrong.any():
                self.first_not_finite = self._seen + int(wrong.argmax())
        if self.is_positive:
            bits = elements.dtype.type(self._bits.magnitude)
            self.any_negative = self.any_negative or bool((elements > bits).any())  # the sign is the highest bit
        self.all_zero = self.all_zero and not (elements & elements.dtype.type(self._bits.magnitude)).any()
        self._seen += len(elements)


def _is_fp8_scale(name: str, entry: Entry) -> bool:
    return entry.dtype in fp8.SCALE_DTYPES and name.rpartition(".")[2] in fp8.SCALES


def _report(shard: str, tensor: str, current: _TensorScan, scan: Scan) -> None:
    if current.all_zero:
        scan.all_zero.add(tensor)
    if current.first_not_finite is not None:
        index = [int(i) for i in np.unravel_index(current.first_not_finite, current.entry.shape or (1,))]
        got = f"NaN or Inf at {index}" if current.entry.dtype != "F8_E4M3" else f"NaN at {index}"
        scan.findings.append(error("not-a-number", shard, tensor, "numbers", got, _AGAIN))
    elif current.any_negative:
        scan.findings.append(error("scale", shard, tensor, "positive scales", "a negative one", _AGAIN))


def check_zeros(
    modules: Modules, globals_: Mapping[str, float], all_zero: set[str], shards: Mapping[str, str]
) -> list[Finding]:
    """Finds weights that are all zero (warnings), and other NVFP4 linears whose global scale is not positive (errors).

    `globals_`: the global scale of each NVFP4 linear, as stored. `shards`: the shard of each tensor.
    """
    findings = []
    for module, (*_, layout) in modules.nvfp4.items():
        codes = f"{module}.{layout.codes}"
        zero = codes in all_zero or f"{module}.{layout.scales}" in all_zero
        if zero:
            findings.append(warning("all-zero", shards[codes], module, "weights other than 0", "only 0", _ODD))
        elif not is_positive(globals_[module]):
            name = f"{module}.{layout.global_scale}"
            got = f"{globals_[module]}"
            findings.append(error("global-scale", shards[name], name, "a positive number", got, _AGAIN))
    flat = [module for module, shape in modules.plain.items() if len(shape) == 2]
    for module in (*flat, *modules.fp8):
        if f"{module}.weight" in all_zero:
            name = f"{module}.weight"
            findings.append(warning("all-zero", shards[name], name, "weights other than 0", "only 0", _ODD))
    return findings


def is_positive(number: float) -> bool:
    """Whether a weight that is not all zero may have this global scale: it and its reciprocal positive and finite."""
    return 0 < number < float("inf") and 1 / number < float("inf")
