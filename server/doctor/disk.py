"""The disk under a model: whether it rotates, and how fast a shard is read past the page cache."""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

CHUNK = 8 * 2**20  # bytes per read
MOST_BYTES = 256 * 2**20
MOST_SECONDS = 5.0


@dataclass(frozen=True)
class Disk:
    """`device` such as "nvme0n1", "" where a file system has none (overlay, network); then `rotational` is None.

    `method`: "direct" where the page cache was bypassed, "dropped" where it was asked to forget the file first.
    """

    path: str
    model_bytes: int
    device: str
    rotational: bool | None
    read_bytes: int
    seconds: float
    method: str

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.read_bytes / self.seconds if self.seconds else 0.0

    @property
    def load_seconds(self) -> float:
        """How long reading the whole model takes at that speed."""
        return self.model_bytes / self.speed if self.speed else 0.0


def read_disk(model: Path, sys_root: Path = Path("/sys")) -> Disk | None:
    """Measures on the largest shard of a model directory, within MOST_BYTES and MOST_SECONDS; None without shards."""
    shards = sorted(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if not shards:
        return None
    largest = shards[-1]
    read, seconds, method = measure(largest)
    device, rotational = block_device(largest.stat().st_dev, sys_root)
    total = sum(path.stat().st_size for path in shards)
    return Disk(str(largest), total, device, rotational, read, seconds, method)


def block_device(number: int, sys_root: Path) -> tuple[str, bool | None]:
    """(name, whether it rotates) of the disk with a file's device number; a partition's disk is its parent.

    /sys/dev/block/MAJOR:MINOR and queue/rotational: Documentation/ABI/stable/sysfs-block of Linux.
    """
    link = sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not link.exists():
        return "", None
    node = link.resolve()
    disk = node if (node / "queue").is_dir() else node.parent
    flag = disk / "queue" / "rotational"
    return disk.name, flag.read_text(encoding="ascii").strip() == "1" if flag.is_file() else None


def measure(path: Path) -> tuple[int, float, str]:
    """(bytes read, seconds, method) of reading from the start of a file, past the page cache where that is possible."""
    try:
        return (*_read(path, os.O_DIRECT), "direct")
    except OSError:  # the file system has no direct reads
        return (*_read(path, 0), "dropped")


def _read(path: Path, flags: int) -> tuple[int, float]:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.posix_fadvise(descriptor, 0, MOST_BYTES, os.POSIX_FADV_DONTNEED)
        # Direct reads need an aligned buffer, which an anonymous mapping is.
        with mmap.mmap(-1, CHUNK) as buffer:
            read, began = 0, time.perf_counter()
            while read < MOST_BYTES and time.perf_counter() - began < MOST_SECONDS:
                count = os.readv(descriptor, [buffer])
                read += count
                if count < CHUNK:
                    break
            return read, time.perf_counter() - began
    finally:
        os.close(descriptor)
