"""The protocol of kernels/cuda/all_reduce/all_reduce.cuh as a state machine: every order of the ranks' accesses.

A call's number is its epoch. A position holds the epoch that wrote it: a line's data and epoch are written and read
together, and data differs from epoch to epoch. Two positions stand for two lines of different threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kernels.tools.native_all_reduce import PLACES


@dataclass(frozen=True)
class Rules:
    """How a call goes; the kernel's are the defaults."""

    ranks: int = 2
    halves: int = 2
    flags: bool = True  # whether a reader waits for its own epoch's line, or takes any that is not empty


@dataclass(frozen=True)
class Rank:
    """A rank's progress: its epoch, the positions written, and the (other rank, position) pairs read."""

    epoch: int = 1
    written: frozenset[int] = frozenset()
    read: frozenset[tuple[int, int]] = frozenset()


Memory = dict[tuple[int, int, int], int]  # by rank, half, position
Move = tuple[int, Rank, Memory]


def moves(rules: Rules, sizes: tuple[int, ...], ranks: tuple[Rank, ...], memory: Memory) -> Iterator[Move]:
    """What may happen next: one access by one rank. Raises AssertionError where it reads another epoch's data."""
    for me, rank in enumerate(ranks):
        if rank.epoch > len(sizes):
            continue
        half = rank.epoch % rules.halves
        lines = set(range(sizes[rank.epoch - 1]))
        for place in lines - rank.written:
            yield me, replace(rank, written=rank.written | {place}), memory | {(me, half, place): rank.epoch}
        others = [other for other in range(rules.ranks) if other != me]
        for other, place in itertools.product(others, rank.written):  # a thread looks for the lines that it has sent
            held = memory.get((other, half, place), 0)
            if (other, place) in rank.read or held == 0 or (rules.flags and held != rank.epoch):
                continue
            assert held == rank.epoch, f"epoch {rank.epoch} read what epoch {held} wrote"
            yield me, replace(rank, read=rank.read | {(other, place)}), memory


def explore(rules: Rules, sizes: tuple[int, ...]) -> int:
    """Goes through all states; returns how many. Raises AssertionError in one that reads wrongly or cannot go on."""
    start = (tuple(Rank() for _ in range(rules.ranks)), frozenset[tuple[tuple[int, int, int], int]]())
    seen, waiting = {start}, [start]
    while waiting:
        ranks, held = waiting.pop()
        went = False
        for me, moved, memory in moves(rules, sizes, ranks, dict(held)):
            went = True
            ended = len(moved.read) == (rules.ranks - 1) * sizes[moved.epoch - 1]
            after = Rank(moved.epoch + 1) if ended else moved  # the stream's next kernel may begin
            state = ((*ranks[:me], after, *ranks[me + 1 :]), frozenset(memory.items()))
            if state not in seen:
                seen.add(state)
                waiting.append(state)
        epochs = [rank.epoch for rank in ranks]
        assert went or min(epochs) > len(sizes), f"ranks wait for each other for ever, in epochs {epochs}"
        assert max(epochs) - min(epochs) <= 1
    return len(seen)


SIZES = [(2, 2, 2, 2), (2, 1, 1, 2, 2), (1, 2, 1, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_two_ranks_never_lose_or_mix_up_a_epoch(sizes: tuple[int, ...]) -> None:
    assert explore(Rules(), sizes) > 100


def test_nor_do_three() -> None:
    assert explore(Rules(ranks=3), (1, 1, 1)) > 300


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Rules(halves=1), "for ever"),  # a line is overwritten before all have read it
        (Rules(flags=False), "read what epoch"),  # one of two epochs before is taken for this epoch's
    ],
)
def test_one_half_or_no_flags_would_not_do(broken: Rules, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        explore(broken, SIZES[0])


BLOCKS = 64
LAST_TURN = 65535


def launch(counters: list[int], grid: int, order: list[int], *, own_only: bool = False) -> set[int]:
    """What the blocks of one launch read as their epoch, blocks running in `order`; `end_epoch`'s writes."""
    epochs = set()
    for block in order:
        epoch = counters[block]
        epochs.add(epoch)
        after = 2 if epoch == LAST_TURN else epoch + 1
        for index in range(block, block + 1 if own_only else BLOCKS, grid):
            counters[index] = after
    return epochs


@pytest.mark.parametrize("first", [1, LAST_TURN - 20])
def test_all_blocks_of_a_launch_count_the_same_epoch(first: int) -> None:
    seeded, counters, parity = random.Random(first), [first] * BLOCKS, first % 2  # noqa: S311
    for _ in range(200):
        grid = seeded.randint(1, BLOCKS)
        (epoch,) = launch(counters, grid, seeded.sample(range(grid), grid))
        assert epoch != 0
        assert epoch % 2 == parity
        parity = 1 - parity


def test_counting_own_blocks_alone_would_not_do() -> None:
    counters = [1] * BLOCKS
    launch(counters, 4, [0, 1, 2, 3], own_only=True)
    assert len(launch(counters, 8, list(range(8)), own_only=True)) > 1


RENEWED = 8  # all_reduce_plan.h's: of PLACES, in each epoch


def oldest(renewed: int) -> int:
    """The longest time, in epochs, for which a position stays unwritten if calls write no own lines for two cycles.

    Kernels renew positions (epoch // 2) * RENEWED + 0, 1 … of the epoch's half.
    """
    visits: dict[tuple[int, int], list[int]] = {}
    epochs = [*range(1, LAST_TURN + 1), *range(2, LAST_TURN + 1), *range(2, LAST_TURN + 1)]
    for time, epoch in enumerate(epochs):
        for i in range(renewed):
            visits.setdefault((epoch % 2, ((epoch >> 1) * renewed + i) % PLACES), []).append(time)
    assert len(visits) == 2 * PLACES
    firsts = max(times[0] for times in visits.values())  # zeros until then, which are no epoch's number
    assert firsts < LAST_TURN
    return max(later - former for times in visits.values() for former, later in itertools.pairwise(times))


def test_no_place_ever_holds_a_line_of_the_same_number_from_a_cycle_before() -> None:
    assert oldest(RENEWED) < LAST_TURN - 1


def test_renewing_fewer_places_would_leave_some_for_a_whole_cycle() -> None:
    assert oldest(4) == LAST_TURN - 1
