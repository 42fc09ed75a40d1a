"""What ptxas reported of each kernel for sm_70, and what a V100's multiprocessor offers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REGISTERS, SHARED_BYTES = 65536, 96 * 1024

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_70'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel's use of a multiprocessor; `name` is mangled."""

    name: str
    registers: int
    shared_bytes: int  # static
    spill_stores: int  # bytes
    spill_loads: int


def kernels(build: Path, source: str = "*/*") -> list[Kernel]:
    """The kernels of the sources that match `source`, as ROOM/NAME."""
    found = []
    for report in sorted(build.glob(f"{source}.o.ptxas")):
        for entry in _ENTRY.finditer(report.read_text()):
            shared = re.search(r"(\d+) bytes smem", entry["rest"])
            numbers = (entry["registers"], shared[1] if shared else 0, entry["stores"], entry["loads"])
            found.append(Kernel(entry["name"], *map(int, numbers)))
    return found


def kernel(build: Path, source: str, part_of_name: str) -> Kernel:
    """The one kernel whose name contains `part_of_name`."""
    (found,) = [one for one in kernels(build, source) if part_of_name in one.name]
    return found
