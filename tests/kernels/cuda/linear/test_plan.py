"""The choice of kernel, a pure function: no GPU."""

import pytest

from kernels.tools.native import Library, Plan


def name(library: Library, plan: Plan) -> str:
    shape = library.shape(plan.variant)
    assert shape is not None
    return shape.name


@pytest.mark.parametrize(
    ("m", "variant"),
    [
        (1, "mma2"),
        (2, "mma2"),
        (3, "mma4"),
        (4, "mma4"),
        (5, "mma8"),
        (8, "mma8"),
        (9, "mma16"),
        (17, "mma32"),
        (33, "mma64"),
        (65, "mma128"),
        (768, "mma128"),
    ],
)
def test_a_v100_gets_the_smallest_block_that_holds_its_tokens(library: Library, m: int, variant: str) -> None:
    plan = library.plan(m, 5120, 5120)
    assert (plan.path, name(library, plan)) == ("fused", variant)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("m", "variant"),
    [(1, "mma4"), (4, "mma4"), (5, "mma8"), (16, "mma16"), (32, "mma32"), (33, "mma64"), (448, "mma64")],
)
def test_fp8_gets_the_smallest_block_that_needs_no_spills(library: Library, m: int, variant: str, group: int) -> None:
    plan = library.plan(m, 5120, 5120, group)
    assert (plan.path, name(library, plan)) == ("fused", variant)
    assert library.plan(449, 5120, 5120, group).path == "dequantize"


@pytest.mark.parametrize(("arch", "most"), [(70, 768), (80, 32), (90, 32)])
def test_many_tokens_are_dequantized_for_cublas(library: Library, arch: int, most: int) -> None:
    paths = [library.plan(m, 5120, 5120, arch=arch).path for m in (most, most + 1)]
    assert paths == ["fused", "dequantize"]


@pytest.mark.parametrize("n", [1, 31, 1000, 5120, 8240, 51200, 248320])
@pytest.mark.parametrize("m", [1, 4, 8, 64, 700])
def test_every_multiprocessor_gets_work_but_no_block_less_than_two_stages(library: Library, m: int, n: int) -> None:
    plan = library.plan(m, n, 5120)
    shape = library.shape(plan.variant)
    assert shape is not None
    places = 80 * shape.blocks_per_processor
    stages = plan.tiles * -(-80 // shape.stage_tiles)
    assert plan.tiles == -(-n // shape.rows) * -(-m // shape.tokens)
    assert plan.blocks == plan.tiles or plan.blocks <= places
    assert plan.blocks in (plan.tiles, places) or stages // plan.blocks >= 2
    if plan.blocks != plan.tiles:
        assert plan.workspace_words == plan.blocks * 2 * shape.tokens * shape.rows


def test_every_plan_says_why(library: Library) -> None:
    assert all(library.plan(m, 5120, 5120).reason for m in (1, 8, 64, 4096))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"m": 0}, "m: expected at least 1, got 0"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"k": 40}, "k: expected a multiple of 16, got 40"),
        ({"group": 64}, "group: expected 16 or 32, or for FP8 0 or 128, got 64"),
        ({"arch": 61}, "arch: expected 70 or more, got 61"),
    ],
)
def test_what_does_not_fit_is_named(library: Library, problem: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        library.plan(**{"m": 1, "n": 64, "k": 64, **problem})
