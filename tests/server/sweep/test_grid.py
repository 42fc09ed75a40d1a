import pytest

from server.config.devices import Device, Devices
from server.config.presets import usable_cores
from server.config.settings import load_config
from server.errors import ConfigError
from server.sweep.grid import CPU_AXES, GPU_AXES, Axis, parse_axes, points

CPU = load_config(["--model", "m"], {}, lambda: Devices((), "none here"))
V100 = Device("Tesla V100", "GPU-1", "7.0", 16, nvlink=False)


def test_the_grid_is_every_combination_with_typed_values() -> None:
    axes = parse_axes(["max-num-seqs=8,16", "--enforce-eager=true,false", "OMP_NUM_THREADS=1,2"], CPU)
    assert axes == (
        Axis("max-num-seqs", (8, 16)),
        Axis("enforce-eager", (True, False)),
        Axis("OMP_NUM_THREADS", ("1", "2")),
    )
    grid = points(axes)
    assert len(set(grid)) == 8
    assert str(grid[0]) == "max-num-seqs=8 enforce-eager=true OMP_NUM_THREADS=1"
    assert grid[-1].arguments == ["--max-num-seqs", "16", "--no-enforce-eager"]
    assert grid[-1].variables == {"OMP_NUM_THREADS": "2"}


def test_without_axes_the_set_is_that_of_the_device() -> None:
    on_cpu = parse_axes([], CPU)
    assert [axis.name for axis in on_cpu] == list(CPU_AXES)
    assert str(usable_cores()) in {axis.name: axis.values for axis in on_cpu}["OMP_NUM_THREADS"]
    config = CPU.model_copy(update={"gpus_needed": 1, "devices": Devices((V100,))})
    assert [axis.name for axis in parse_axes([], config)] == list(GPU_AXES)


@pytest.mark.parametrize(
    ("varied", "message"),
    [
        (["max-num-seq=1"], "did you mean max-num-seqs"),
        (["max-num-seqs=many"], "expected an integer, got 'many'"),
        (["max-num-seqs"], "expected NAME=VALUE,VALUE"),
        (["max-num-seqs="], "expected NAME=VALUE,VALUE"),
        (["max-num-seqs=1", "max-num-seqs=2"], "given twice"),
        (["AWS_SECRET=1"], "no variable that the engine gets"),
        (["dtype=float17"], "float16"),
    ],
)
def test_what_cannot_be_varied_is_refused(varied: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_axes(varied, CPU)
    assert message in str(caught.value)
