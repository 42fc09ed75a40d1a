import pytest

from quant.verify.tensor_parallel import SIZES, obstacles


def sizes_that_work(linears, group_size=16, config=None):
    sized = {module: (*shape, group_size) for module, shape in linears.items()}
    return [size for size, found in obstacles(sized, config or {}).items() if not found]


@pytest.mark.parametrize(
    ("module", "shape", "group_size", "works"),
    [
        ("l.down_proj", (64, 128), 16, [1, 2, 4, 8]),
        ("l.down_proj", (64, 128), 32, [1, 2, 4]),
        ("l.o_proj", (576, 576), 16, [1, 2, 4]),
        ("l.down_proj", (64, 48), 16, [1]),
        ("l.down_proj", (64, 40), 16, []),
        ("l.q_proj", (64, 40), 16, []),
        ("l.q_proj", (6, 64), 16, [1, 2]),
        ("l.in_proj_a", (48, 5120), 16, [1, 2, 4, 8]),
        ("l.router_like", (3, 64), 16, [1, 2, 4, 8]),
    ],
)
def test_a_size_works_when_every_rank_gets_whole_groups_and_whole_rows(module, shape, group_size, works):
    assert sizes_that_work({module: shape}, group_size) == works


@pytest.mark.parametrize(
    ("config", "works"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, [1]),
        ({"num_attention_heads": 24, "num_key_value_heads": 4}, [1, 2, 4, 8]),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, [1, 2, 4]),
        ({"text_config": {"num_attention_heads": 2}}, [1, 2]),
        ({"num_attention_heads": 32, "linear_num_value_heads": 4}, [1, 2, 4]),
        ({"num_attention_heads": "many"}, [1, 2, 4, 8]),
    ],
)
def test_heads_must_divide_and_key_value_heads_may_be_copied(config, works):
    assert sizes_that_work({}, config=config) == works


def test_copied_key_value_heads_need_no_divisible_rows():
    config = {"num_attention_heads": 8, "num_key_value_heads": 1}

    assert sizes_that_work({"l.k_proj": (1, 64), "l.v_proj": (1, 64)}, config=config) == list(SIZES)


def test_an_obstacle_names_layer_dimension_length_and_the_sizes_that_work():
    (obstacle,) = obstacles({"model.layers.0.mlp.down_proj": (64, 96, 16)}, {})[4]

    assert str(obstacle) == (
        "TP=4: model.layers.0.mlp.down_proj: K=96 does not leave each rank a multiple of the group size 16; "
        "sizes that work: 1, 2"
    )


def test_the_same_obstacle_is_told_once_not_for_every_layer():
    linears = {f"model.layers.{number}.mlp.down_proj": (64, 96, 16) for number in range(60)}

    assert len(obstacles(linears, {})[8]) == 1
