"""Sender of the engine's progress datagrams (docs/architecture.md).

Datagrams go to the Unix socket named by VOLTSERVE_PROGRESS_SOCKET. Without the variable nothing is sent. Reports must
never disturb the engine, so sending does not block. A datagram that cannot be delivered is lost. Each one carries
absolute figures, so the next one replaces it.
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
MAX_TEXT = 400  # characters per field; three fields of three-byte characters fit one datagram
MIN_INTERVAL = 0.2  # seconds between two `progress` datagrams


def phase(name: str) -> None:
    """Reports that this process enters phase `importing`, `configuring`, `weights` or `warmup`."""
    _send({"event": "phase", "phase": name, "rank": world_rank()})


@cache  # a choice made once per layer is reported once per process
def decision(what: str, choice: str, reason: str) -> None:
    """Reports that the engine chose `choice` for `what` by itself, and why."""
    _send({"event": "decision", "what": what, "choice": choice, "reason": reason, "rank": world_rank()})


def settle(chosen: Choice) -> Choice:
    """Reports a choice and returns it.

    Raises:
        ValueError: the choice has a problem, so the engine must not start.
    """
    if chosen.problem:
        raise ValueError(chosen.problem)
    decision(chosen.what, chosen.choice, chosen.reason)
    return chosen


def pulse() -> None:
    """Reports that the engine process has just answered."""
    _send({"event": "pulse", "rank": world_rank()})


def fault(kind: str, message: str) -> None:
    """Reports the exception of type `kind` that ends this process. Without a type: how another process ended."""
    _send({"event": "fault", "type": kind, "message": message, "rank": world_rank()})


class WeightsProgress:
    """Bytes of the checkpoint that this process has read, reported at most every 0.2 s and at the end."""

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
            self._report(file)

    def finish(self) -> None:
        """Reports that all bytes are read, even if some tensors of the checkpoint were skipped."""
        if self.done != self.total:
            self.done = self.total
            self._report("")

    def _report(self, file: str) -> None:
        message: dict[str, str | int] = {"event": "progress", "phase": "weights", "rank": world_rank()}
        message |= {"done": self.done, "total": self.total, "unit": "bytes", "file": file}
        _send(message)


def world_rank() -> int:
    """The rank of this process among the workers; 0 before torch.distributed is initialized."""
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
    except OSError:  # no listener, a full queue or too long a path: the datagram is lost
        return


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
