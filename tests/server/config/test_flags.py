import pytest

from server.config.flags import REFUSED, engine_flags, parse_arguments, parse_variable, render
from server.errors import ConfigError


def parse(line: str) -> dict[str, object]:
    return dict(parse_arguments(line.split(), engine_flags()))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-num-seqs 4", {"max-num-seqs": 4}),
        ("--max-num-seqs=4", {"max-num-seqs": 4}),
        ("--max_num_seqs 4", {"max-num-seqs": 4}),
        ("--max-num-seqs 4 --max-num-seqs 8", {"max-num-seqs": 8}),
        ("-tp 2", {"tensor-parallel-size": 2}),
        ("-tp=2", {"tensor-parallel-size": 2}),
        ("-q quasarnvfp4", {"quantization": "quasarnvfp4"}),
        ("-O3", {"optimization-level": "3"}),
        ("--seed -1", {"seed": -1}),
        ("--gpu-memory-utilization 0.90", {"gpu-memory-utilization": 0.9}),
        ("--max-model-len 8k", {"max-model-len": 8000}),
        ("--max-model-len 8K", {"max-model-len": 8192}),
        ("--max-model-len 25.6k", {"max-model-len": 25600}),
        ("--max-model-len auto", {"max-model-len": "auto"}),
        ("--max-model-len -1", {"max-model-len": "auto"}),
        ("--enforce-eager", {"enforce-eager": True}),
        ("--no-enforce-eager", {"enforce-eager": False}),
        ("--enforce-eager --no-enforce-eager", {"enforce-eager": False}),
        ("--disable-log-stats", {"disable-log-stats": True}),
        ("--served-model-name a b --seed 1", {"served-model-name": ["a", "b"], "seed": 1}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph-capture-sizes": [1, 2, 4]}),
        ('--limit-mm-per-prompt {"image":0}', {"limit-mm-per-prompt": {"image": 0}}),
        (
            "--compilation-config.mode 3 --compilation-config.pass_config.fuse_norm_quant true",
            {"compilation-config": {"mode": 3, "pass_config": {"fuse_norm_quant": True}}},
        ),
    ],
)
def test_vllm_s_own_syntax_is_understood(line: str, expected: dict[str, object]) -> None:
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-modellen 4", "unknown flag '--max-modellen'; did you mean --max-model-len"),
        ("--zzzzqqqq 4", "none of the"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--max-num-seqs --seed 1", "--max-num-seqs needs a value"),
        ("--max-num-seqs many", "expected an integer, got 'many'"),
        ("--gpu-memory-utilization most", "expected a number"),
        ("--max-num-batched-tokens auto", "expected a count"),
        ("--max-model-len 0.5", "expected a count"),
        ("--dtype float61", "unknown value 'float61'; did you mean float16"),
        ("--limit-mm-per-prompt 3", "expected a JSON object"),
        ("--enforce-eager=true", "takes no value"),
        ("--seed.x 1", "dotted keys"),
        ("--no-seed", "unknown flag"),
        ("models/x", "the model directory --model"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse(line)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("enforce-eager", "true", True),
        ("enforce-eager", "0", False),
        ("served-model-name", "a b", ["a", "b"]),
        ("max-model-len", "8192", 8192),
    ],
)
def test_a_variable_holds_the_same_values(name: str, text: str, expected: object) -> None:
    assert parse_variable(engine_flags()[name], text) == expected


@pytest.mark.parametrize(("name", "text"), [("enforce-eager", "maybe"), ("seed", ""), ("seed", "x")])
def test_a_malformed_variable_is_an_error(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        parse_variable(engine_flags()[name], text)


@pytest.mark.parametrize(
    "line",
    [
        "--max-num-seqs 4",
        "--no-enforce-eager",
        "--seed=-1",
        "--served-model-name a b",
        '--compilation-config {"mode":3}',
        "--max-model-len auto",
    ],
)
def test_rendered_flags_parse_to_the_same_values(line: str) -> None:
    flags = engine_flags()
    [(name, value)] = parse(line).items()
    assert render(flags[name], value) == line.split()  # type: ignore[arg-type]


def test_a_switch_that_is_off_and_cannot_be_negated_is_left_out() -> None:
    assert render(engine_flags()["disable-log-stats"], False) == []


def test_every_refused_flag_is_one_of_vllm_s() -> None:
    assert set(REFUSED) <= set(engine_flags())
