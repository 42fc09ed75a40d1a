"""Sender of the engine's progress datagrams (docs/architecture.md).

Datagrams go to the Unix socket named by VOLTSERVE_PROGRESS_SOCKET; without the variable nothing is sent. Telling the
gateway how far the engine is must never hurt the engine: sending does not block, and a datagram that cannot be
delivered is lost (each carries absolute figures, so the next one makes up for it).
"""

import json
import os
import socket
import sys
import time
from functools import cache

from engine.environment import PROGRESS_SOCKET
from engine.volta import Choice

MAX_BYTES = 4096
MAX_TEXT = 400  # characters of one field; three fields of three-byte characters still fit a datagram
MIN_INTERVAL = 0.2  # seconds between two `progress` datagrams


def phase(name: str) -> None:
    """Says that this process enters phase `importing`, `configuring`, `weights` or `warmup`."""
    _send({"event": "phase", "phase": name, "rank": world_rank()})


@cache  # a choice made once per layer is told once per process
def decision(what: str, choice: str, reason: str) -> None:
    """Says that the engine chose `choice` for `what` by itself, and why."""
    _send({"event": "decision", "what": what, "choice": choice, "reason": reason, "rank": world_rank()})


def settle(chosen: Choice) -> Choice:
    """Tells a choice and returns it.

    Raises:
        ValueError: it is why the engine must not start.
    """
    if chosen.problem:
        raise ValueError(chosen.problem)
    decision(chosen.what, chosen.choice, chosen.reason)
    return chosen


def pulse() -> None:
    """Says that the engine process has just answered."""
    _send({"event": "pulse", "rank": world_rank()})


def fault(kind: str, message: str) -> None:
    """Says that an exception, of type `kind`, ends this process; or with no type, how another process ended."""
    _send({"event": "fault", "type": kind, "message": message, "rank": world_rank()})


class WeightsProgress:
    """Bytes of the checkpoint read by this process, told at most every 0.2 s and at the end."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self._last_sent = float("-inf")

    def expect(self, size: int) -> None:
        """Adds `size` bytes to the total."""
        self.total += size

    def advance(self, size: int, file: str) -> None:
        """Adds `size` bytes, read from the shard `file`."""
        self.done += size
        now = time.monotonic()
        if now - self._last_sent >= MIN_INTERVAL or self.done >= self.total:
            self._last_sent = now
            self._tell(file)

    def finish(self) -> None:
        """Says that all is read, also where some tensors of the checkpoint were not wanted."""
        if self.done != self.total:
            self.done = self.total
            self._tell("")

    def _tell(self, file: str) -> None:
        message: dict[str, str | int] = {"event": "progress", "phase": "weights", "rank": world_rank()}
        message |= {"done": self.done, "total": self.total, "unit": "bytes", "file": file}
        _send(message)


def world_rank() -> int:
    """Rank of this process among the workers; 0 before torch.distributed is up."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return 0
    rank: int = distributed.get_rank()
    return rank


def _send(message: dict[str, str | int]) -> None:
    path = os.environ.get(PROGRESS_SOCKET)
    if not path:
        return
    fields = {key: _shorten(value) if isinstance(value, str) else value for key, value in message.items()}
    data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    if len(data) > MAX_BYTES:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(data, path)
    except OSError:  # nobody listens, the queue is full, the path is too long: the datagram is lost
        return


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
