"""Work on all cores: one thread a block of rows, a matrix or a window, where torch would split every single operation.

Splitting each operation ends each in a barrier; with a second process on the machine, every barrier waits for a thread
that is not running, and a walk of many small operations slows down tenfold and more (seen; docs/log.md).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Temporaries of about a megabyte each, near a core's cache, and several blocks for each core even in a small matrix.
CHUNK_ELEMENTS = 1 << 17


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Slices that cover `rows` rows of `columns` elements, each about CHUNK_ELEMENTS large."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def for_row_chunks(rows: int, columns: int, work: Callable[[slice], None]) -> None:
    """Calls `work` with slices that cover `rows` rows of `columns` elements, several at a time, in any order."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    map_single_threaded(work, [slice(start, min(start + step, rows)) for start in range(0, rows, step)])


def map_single_threaded(
    work: Callable[[T], R], items: Iterable[T], on_failure: Callable[[], None] = lambda: None
) -> list[R]:
    """[work(item) for item in items], as many at a time as torch has threads, each one's operations on one thread.

    On any error, and on Ctrl-C, items that have not begun are dropped and those that have are waited for; `on_failure`
    is called before, and may have them end early.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # what has not begun need not
                on_failure()
                raise
    finally:
        torch.set_num_threads(threads)  # a worker's setting is also what threads started later begin with
