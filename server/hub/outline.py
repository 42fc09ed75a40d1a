"""A model on a hub as an outline: a directory with its small files and its headers. Its weights are holes.

Everything that reads configs and headers works on it as on the model itself: verify, inspect, plan. Range requests read
each shard's header, and nothing after it. Holes take no room on the disk.
"""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from quant.constants import CONFIG, GENERATION_CONFIG, INDEX_NAME, TOKENIZER_CONFIG
from quant.safetensors_header import MAX_HEADER_BYTES
from quant.verify.outline import write_outline
from server.errors import HubError
from server.hub.fetch import selection_of
from server.hub.http import asked, client_of, persistently
from server.hub.listing import Listing, RemoteFile, list_files
from server.hub.selection import SHARD, Selection, size_text
from server.hub.source import Source
from server.hub.transfer import Digests, WrongBytesError

MOST_BYTES = 128 << 20  # of one model; its headers and small files are a thousandth of that
FIRST_BYTES = 4096  # of a shard: most headers of many-shard models end in them
AT_ONCE = 8
# What verify, inspect and plan read besides headers. A tokenizer's vocabulary is larger, and not needed for an answer.
_READ = (
    *(CONFIG, INDEX_NAME, GENERATION_CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json"),
    *("hf_quant_config.json", "quantize_config.json", "quantization_config.json"),
)


@dataclass
class Budget:
    """The bytes read so far, which stay within a bound."""

    what: str
    most: int
    read: int = 0
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        """Counts bytes that are about to be asked for. Raises HubError beyond the bound."""
        with self._lock:
            self.requests += 1
            if self.read + count > self.most:
                raise HubError(
                    f"{self.what}: expected headers and configs within {size_text(self.most)}, got "
                    f"{size_text(self.read + count)}; fetch the model and look at the directory"
                )
            self.read += count


@dataclass(frozen=True)
class Outline:
    """An outline: where it is, of what, and what it took."""

    directory: Path
    listing: Listing
    selection: Selection
    budget: Budget

    def as_text(self) -> str:
        """What was read."""
        return (
            f"read {size_text(self.budget.read)} of {size_text(self.selection.size)} of {self.listing} "
            f"in {self.budget.requests} requests: configs and headers, no weight"
        )


@contextmanager
def outline(source: Source) -> Iterator[Outline]:
    """The outline of a model, until the context ends. Raises HubError."""
    with tempfile.TemporaryDirectory(prefix="voltserve-outline-") as scratch, client_of(source) as client:
        listing = list_files(source)
        selection, index = selection_of(client, listing)
        directory = Path(scratch) / "model"
        directory.mkdir()
        reader = _Reader(client, listing, Budget(str(listing), MOST_BYTES), directory, index)
        if index:
            reader.budget.take(len(index))
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(reader.make, selection.kept))
            write_outline(directory, [file.name for file in selection.kept if not reader.is_whole(file)])
        except OSError as error:
            raise HubError(f"{directory}: {error.strerror or error}; set TMPDIR to a folder with room") from None
        yield Outline(directory, listing, selection, reader.budget)


@dataclass(frozen=True)
class _Reader:
    client: httpx.Client
    listing: Listing
    budget: Budget
    directory: Path
    index: bytes

    def is_whole(self, file: RemoteFile) -> bool:
        """Whether a file is read whole."""
        return file.name in _READ

    def make(self, file: RemoteFile) -> None:
        """Makes a file of the outline: whole, a header before a hole, or a hole."""
        data = b""
        if file.name == INDEX_NAME:
            data = self.index
        elif self.is_whole(file):
            data = self._read(file, 0, file.size)
            self._check(file, data)
        elif file.name.endswith(SHARD):
            data = self._header(file)
        path = self.directory / file.name
        path.write_bytes(data)
        os.truncate(path, file.size)

    def _header(self, file: RemoteFile) -> bytes:
        """The bytes of a shard's header, or its first ones where it claims a length that no reader takes."""
        first = self._read(file, 0, min(FIRST_BYTES, file.size))
        end = 8 + int.from_bytes(first[:8], "little")
        if end <= len(first) or end > min(file.size, 8 + MAX_HEADER_BYTES):
            return first[: max(end, 8)] if end <= len(first) else first
        return first + self._read(file, len(first), end - len(first))

    def _read(self, file: RemoteFile, start: int, count: int) -> bytes:
        """`count` bytes of a file. Raises HubError."""
        what = f"{self.listing}: {file.name}"
        if not count:
            return b""

        def once() -> bytes:
            self.budget.take(count)
            headers = {"Range": f"bytes={start}-{start + count - 1}"}
            with asked(self.client, self.listing.source, file.url, headers) as response:
                if response.status_code != 206 and (start or response.status_code != 200):
                    raise HubError(
                        f"{what}: expected a range of bytes, got status {response.status_code}; fetch it whole"
                    )
                total = response.headers.get("content-range", "").rpartition("/")[2]
                if response.status_code == 200:
                    total = response.headers.get("content-length", "")
                if total.isdecimal() and total != str(file.size):
                    raise HubError(f"{what}: expected {file.size} bytes by the list, got {total[:20]}")
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > count:  # ranges are ignored; an answer read to its end leaves the line in use
                        break
            if len(body) < count:
                raise HubError(f"{what}: expected {count} bytes from {start}, got {len(body)}")
            return bytes(body[:count])

        return persistently(what, once)

    def _check(self, file: RemoteFile, data: bytes) -> None:
        digests = Digests(file)
        digests.update(data)
        try:
            digests.check(file)
        except WrongBytesError as error:
            raise HubError(f"{self.listing}: {file.name}: {error}; try again, or another --endpoint") from None
