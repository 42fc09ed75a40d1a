"""What is read ahead of the next product, a pure function: no GPU."""

import itertools
import re

import pytest

from kernels.tools.native import Library
from kernels.tools.sass_model import Instruction

STAGE_BYTES = {16: 8 * 1152, 32: 8 * 1088}  # two row tiles by four column tiles
TP2 = [(5120, 5120), (5120, 4096), (25600, 5120), (5120, 12800)]


def walked(begin: int, end: int, stages: int) -> list[int]:
    """The stages of a block's run in the order of linear.cuh: its last tile first, and forwards in each."""
    tiles = itertools.groupby(range(begin, end), lambda stage: stage // stages)
    return [stage for tile in reversed([list(t) for _, t in tiles]) for stage in tile]


@pytest.mark.parametrize("m", [1, 4, 8, 16])
@pytest.mark.parametrize(("n", "k"), [*TP2, (51200, 5120), (1000, 576), (33, 48)])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_block_finds_the_first_stages_of_its_run(library: Library, m: int, n: int, k: int, depth: int) -> None:
    plan = library.plan(m, n, k)
    ahead = library.read_ahead(depth * plan.blocks * STAGE_BYTES[16], m, n, k)
    stages = -(-k // 256)
    share, extra = divmod(plan.tiles * stages, plan.blocks)
    assert (ahead.blocks, ahead.depth) == (plan.blocks, min(depth, share + (extra > 0)))
    end = 0
    for block in range(plan.blocks):
        begin, end = end, end + share + (block < extra)
        expected = [*walked(begin, end, stages), -1, -1, -1, -1, -1][: ahead.depth]
        assert [library.stage_ahead(ahead, block, s) for s in range(ahead.depth)] == expected
    assert end == plan.tiles * stages


@pytest.mark.parametrize("group", [16, 32])
def test_the_bytes_asked_for_are_rounded_to_whole_stages(library: Library, group: int) -> None:
    stage = library.plan(1, 5120, 5120, group).blocks * STAGE_BYTES[group]
    depths = [library.read_ahead(int(stage * f), 1, 5120, 5120, group).depth for f in (0, 0.45, 0.55, 1.45, 1.55)]
    assert depths == [0, 0, 1, 1, 2]


def test_blocks_that_find_no_place_at_the_start_are_left_out(library: Library) -> None:
    plan = library.plan(1, 248320, 5120)
    ahead = library.read_ahead(4 << 20, 1, 248320, 5120)
    assert plan.blocks == plan.tiles > ahead.blocks == 80 * 5


@pytest.mark.parametrize("m", [33, 64, 4096])
def test_nothing_is_read_ahead_of_products_of_many_tokens(library: Library, m: int) -> None:
    assert library.read_ahead(4 << 20, m, 5120, 5120).depth == 0


@pytest.mark.parametrize(("arch", "processors", "l2"), [(70, 80, 6 << 20), (90, 132, 50 << 20)])
@pytest.mark.parametrize("m", [1, 4, 8, 16, 32])
def test_while_ranks_meet_as_much_is_read_ahead_as_the_l2_has_room_for(
    library: Library, arch: int, processors: int, l2: int, m: int
) -> None:
    for n, k in TP2:
        ahead = library.read_ahead(library.ahead_bytes(arch, 2), m, n, k, arch=arch, processors=processors)
        assert 0 < ahead.blocks * ahead.depth * STAGE_BYTES[16] <= 0.8 * l2


@pytest.mark.parametrize("arch", [70, 90])
def test_a_kernel_that_waits_for_nobody_reads_nothing_ahead(library: Library, arch: int) -> None:
    assert library.ahead_bytes(arch, 1) == library.ahead_bytes(arch, 0) == 0


def test_a_stage_is_requested_at_once_and_no_load_is_dropped(sass: dict[str, list[Instruction]]) -> None:
    """Nine loads a lane, and nothing before the last that reads what another loaded."""
    code = next(code for name, code in sass.items() if "norm_kernel" in name)
    loads = [at for at, i in enumerate(code) if i.name.startswith("LDG.E.STRONG")]
    assert len(loads) == 9
    for at in loads:
        loaded = code[at].operands.split(",")[0].strip()
        between = [i for i in code[at + 1 : loads[-1] + 1] if loaded in re.findall(r"R\d+", i.operands)]
        assert between == []
