from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.explain import BEGINNINGS, choose_routes

from .test_volta import given

ROOT = Path(__file__).parents[2]


def test_numbers_of_tokens_with_the_same_kernel_are_told_together() -> None:
    def route(tokens: int) -> str:
        return "fma1: reads" if tokens == 1 else "mma8: keeps up" if tokens <= 16 else "dequantize + cuBLAS: many"

    told = [(choice.what, choice.choice, choice.reason) for choice in choose_routes(route)]
    assert told == [
        ("kernel for 1 token", "fma1", "reads"),
        ("kernel for 2 to 16 tokens", "mma8", "keeps up"),
        ("kernel for 17 tokens and more", "dequantize + cuBLAS", "many"),
    ]


@pytest.mark.parametrize(("rows", "columns"), [(25600, 5120), (5120, 2560), (1000, 576)])
def test_the_plans_routes_begin_only_where_they_are_looked_for(rows: int, columns: int) -> None:
    import torch
    import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve

    previous = ""
    for tokens in range(1, 2100):
        route = torch.ops.voltserve._cuda_route(tokens, rows, columns, 16, 70, 80)
        assert route == previous or tokens in BEGINNINGS
        previous = route


def test_the_engine_explains_itself_without_a_gpu() -> None:
    asked = given() | {"matrix": [25600, 5120, 16]}
    done = subprocess.run(
        [sys.executable, "-m", "engine.explain"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    told = {choice["what"]: choice["choice"] for choice in json.loads(done.stdout)}
    assert told["attention backend"]
    assert told["steps of the model"] == "recorded"
    assert told["launchers of Triton's kernels"] in ("Triton's", "engine.triton_driver")
    assert told["kernel for 769 tokens and more"] == "dequantize + cuBLAS"
