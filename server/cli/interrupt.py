"""Ctrl-C in work that another run goes on with: it says so, and a second one waits for nothing."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

_BY_SIGINT = 128 + signal.SIGINT


@contextmanager
def resumable(folder: Path, under_way: str = "the layers under way") -> Iterator[None]:
    """Ends with code 130 on Ctrl-C, once what is under way is kept in `folder`. Only the main thread may use it."""
    came = 0

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 1:
            # Kept results are renamed into place whole, so nothing is lost but what is under way.
            os._exit(_BY_SIGINT)
        print(f"\nvoltserve: stopping after {under_way}; Ctrl-C again stops at once", file=sys.stderr)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what is done is kept in {folder}; run the same command again to go on, or remove it to start afresh"
        nothing = "nothing was done yet"
        print(f"voltserve: stopped; {kept if folder.exists() else nothing}", file=sys.stderr)
        raise typer.Exit(_BY_SIGINT) from None
    finally:
        signal.signal(signal.SIGINT, before)
