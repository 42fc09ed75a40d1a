import threading

import pytest
import torch

from quant.parallel import for_row_chunks, map_single_threaded


def test_results_come_in_the_order_of_the_items():
    release = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert release.wait(30)
        else:
            release.set()
        return item * item

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert map_single_threaded(work, range(6)) == [0, 1, 4, 9, 16, 25]
    finally:
        torch.set_num_threads(threads)


def test_each_item_runs_on_one_thread_and_the_setting_comes_back():
    before = torch.get_num_threads()

    assert map_single_threaded(lambda _: torch.get_num_threads(), range(4)) == [1] * 4
    assert torch.get_num_threads() == before


def test_an_error_ends_it_without_beginning_what_is_left():
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        raise ValueError(item)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with pytest.raises(ValueError, match="0"):
            map_single_threaded(work, range(1000))
    finally:
        torch.set_num_threads(before)
    assert len(begun) < 1000


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 1 << 18), (1000, 640), (0, 16)])
def test_row_chunks_cover_every_row_once(rows, columns):
    seen = torch.zeros(rows)

    def count(chunk: slice) -> None:
        seen[chunk] += 1

    for_row_chunks(rows, columns, count)

    assert bool((seen == 1).all())
