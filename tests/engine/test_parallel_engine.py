"""The real engine on one rank and on two: every format, and mixtures of experts, give the dequantized twin's tokens.

The reference is transformers on the twin's weights in float32, one rank and two alike, so that the ranks agree too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lookalikes import quasar
from lookalikes.random_models import MIXTRAL, QWEN3, QWEN3_MOE, Architecture, formats, fp8_formats, write_model
from scripts.gpu_tp2.greedy import PROMPTS, TOKENS, run_jobs

pytestmark = pytest.mark.e2e

HYBRID = "hybrid"  # tests/e2e/test_hybrid_model.py has it on one rank
LIMIT_S = 500  # a bound on a hang, not a check of speed


@dataclass(frozen=True)
class Case:
    architecture: Architecture
    form: str
    ranks: int

    @property
    def model(self) -> str:
        return f"{self.architecture.model_type} {self.form}".replace(" ", "-")

    def __str__(self) -> str:
        return f"{self.model}-tp{self.ranks}"


# One rank of the other formats is layers/test_quantization_formats.py's and test_real_engine.py's.
CASES = [
    *(Case(QWEN3, form, 2) for form in formats("")),
    Case(QWEN3, "modelopt AWQ", 1),
    *(Case(QWEN3, form, 2) for form in ("compressed-tensors mixed", "modelopt mixed")),
    *(Case(QWEN3, form, 1) for form in ("fp8 blocks", "compressed-tensors fp8")),
    *(Case(QWEN3_MOE, "compressed-tensors", ranks) for ranks in (1, 2)),
    *(Case(MIXTRAL, "modelopt", ranks) for ranks in (1, 2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models, their twins, and what the engine made of each case."""
    made = tmp_path_factory.mktemp("parallel")
    for case in CASES:
        if not (made / case.model).exists():
            write_model(made / case.model, made / f"{case.model}-twin", case.architecture, case.form)
    jobs = []
    for case in CASES:
        flags = ["--model", str(made / case.model), "--tensor-parallel-size", str(case.ranks)]
        if quantization := (formats(case.architecture.router) | fp8_formats())[case.form].quantization:
            flags += ["--quantization", quantization]
        jobs.append({"flags": flags, "output": str(made / f"{case}.json")})
    quasar.write(made / HYBRID)
    flags = [
        "--model",
        str(made / HYBRID),
        "--tensor-parallel-size",
        "2",
        "--block-size",
        "128",
        "--language-model-only",
    ]
    jobs.append({"flags": flags, "output": str(made / f"{HYBRID}.json")})
    run_jobs(made, jobs, "0|1", LIMIT_S)
    return made


def answers(folder: Path, case: Case | str) -> list[dict[str, Any]]:
    made = json.loads((folder / f"{case}.json").read_bytes())
    assert isinstance(made, list), made["error"]
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_tokens_and_their_probabilities_are_the_dequantized_twin_s(folder: Path, case: Case) -> None:
    twin = AutoModelForCausalLM.from_pretrained(folder / f"{case.model}-twin", dtype=torch.float32).eval()
    expect_answers_of(twin, folder, case)


def test_gated_deltanet_heads_and_their_states_are_split_over_ranks(folder: Path, tmp_path: Path) -> None:
    expect_answers_of(quasar.write(tmp_path), folder, HYBRID)


def expect_answers_of(twin: Any, folder: Path, case: Case | str) -> None:
    for prompt, answer in zip(PROMPTS, answers(folder, case), strict=True):
        tokens = answer["tokens"]
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, rtol=0, atol=1e-3)
