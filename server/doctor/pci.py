"""Reads NVIDIA's cards on the PCI bus, with or without a driver: from sysfs, and from the kernel's log."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NVIDIA = "0x10de"
DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA and 3D controllers; a card's sound is another device
UNSET = 0x20000000  # IORESOURCE_UNSET: the kernel found no addresses for a region (include/linux/ioport.h)
GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "32": 5, "64.0": 6}
MOST_RECORDS = 50_000  # of the kernel's log; its buffer holds fewer

# Lines of the kernel's log about a card whose memory has no PCI addresses.
NO_ADDRESSES = re.compile(
    r"NVRM: .*(?:PCI I/O region assigned to your NVIDIA device is invalid|BAR\d is 0M)"
    r"|pci [\da-f:.]+: BAR \d.*: (?:no space for|failed to assign|can't assign)"
)
LOST = re.compile(r"NVRM: .*(?:fallen off the bus|Xid \([^)]*\): 79\b)")


@dataclass(frozen=True)
class Card:
    """One card by PCI address, such as 0000:1a:00.0. None where the system does not report a value.

    `driver`: the kernel module that drives it, or empty. `no_addresses`: one of its regions has no addresses. `width`
    and `generation`: the card's own maximum, whatever the slot's. `node`: its NUMA node; `cores`: that node's cores.
    """

    address: str
    driver: str
    no_addresses: bool
    width: int | None
    generation: int | None
    node: int | None
    cores: frozenset[int]


def read_cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """NVIDIA's cards, by address. `root` stands for /."""
    folder = root / "sys/bus/pci/devices"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(
        _card(device, root)
        for device in found
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAY)
    )


def _card(device: Path, root: Path) -> Card:
    link = device / "driver"
    node = _number(_text(device / "numa_node"))
    known = node if node is not None and node >= 0 else None
    cores = "" if known is None else _text(root / f"sys/devices/system/node/node{known}/cpulist")
    width = _number(_text(device / "max_link_width"))
    return Card(
        address=device.name,
        driver=link.resolve().name if link.exists() else "",
        no_addresses=any(_is_unset(line) for line in _text(device / "resource").splitlines()),
        width=width if width and width <= 32 else None,  # 255 and 0: unknown
        generation=GENERATIONS.get(_text(device / "max_link_speed").split(" ")[0]),
        node=known,
        cores=frozenset(_cpu_list(cores)),
    )


def _is_unset(line: str) -> bool:
    """A line of `resource`: first and last address, and flags."""
    fields = [_number(word, 16) for word in line.split()]
    if len(fields) != 3 or None in fields:
        return False
    start, end, flags = fields
    return bool(flags) and (bool((flags or 0) & UNSET) or (start == 0 and bool(end)))


def _cpu_list(text: str) -> Iterator[int]:
    """The kernel's lists, such as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> tuple[str, ...] | None:
    """The log's lines about cards without addresses and cards lost; None where this user may not read it."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    lines = []
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # overwritten meanwhile; the next one is there
                continue
            if not record:
                break
            lines += record.decode("utf-8", "replace").splitlines()
    except OSError:  # EAGAIN at the end; EPERM where only root may read it
        if not lines:
            return None
    finally:
        os.close(log)
    texts = (line.partition(";")[2] or line for line in lines)
    return tuple(text for text in texts if NO_ADDRESSES.search(text) or LOST.search(text))
