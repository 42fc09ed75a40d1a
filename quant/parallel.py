"""Work on all cores: one thread per block of rows, matrix or window.

Torch would split every operation over all threads, and end each in a barrier. With a second process on the machine,
every barrier waits for a thread that is not running. Many small operations then take ten times as long and more
(seen; docs/log.md).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Makes temporaries of about a megabyte, near a core's cache, and several blocks per core even in a small matrix.
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
    """[work(item) for item in items], as many at a time as torch has threads, each on one thread.

    On any error, and on Ctrl-C, items that have not begun are dropped. Then `on_failure` is called, which may make the
    running ones end early, and the running ones are waited for.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # drops items that have not begun
                on_failure()
                raise
    finally:
        torch.set_num_threads(threads)  # threads started later inherit a worker's setting
