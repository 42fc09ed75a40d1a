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
    Case(QWEN3, "modelopt mixed", 2),
    Case(QWEN3, "fp8 blocks", 1),
    *(Case(QWEN3_MOE, "compressed-tensors", ranks) for ranks in (1, 2)),
    *(Case(MIXTRAL, "modelopt", ranks) for ranks in (1, 2)),
]


# The other mixtures of FP8 and NVFP4, for `make test-long`.
LONG_CASES = [
    *(Case(QWEN3, "compressed-tensors mixed", ranks) for ranks in (1, 2)),
    Case(QWEN3, "compressed-tensors fp8", 2),
    Case(QWEN3_MOE, "compressed-tensors mixed", 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models, their twins, and what the engine made of each case."""
    made = tmp_path_factory.mktemp("parallel")
    jobs = [*jobs_of(CASES, made), hybrid_job(made, HYBRID, 2)]
    quasar.write(made / HYBRID)
    run_jobs(made, jobs, "0|1", LIMIT_S)
    return made


def jobs_of(cases: list[Case], made: Path) -> list[dict[str, Any]]:
    """Writes the cases' models into `made`; returns what greedy.py is to do with them."""
    for case in cases:
        if not (made / case.model).exists():
            write_model(made / case.model, made / f"{case.model}-twin", case.architecture, case.form)
    jobs = []
    for case in cases:
        flags = ["--model", str(made / case.model), "--tensor-parallel-size", str(case.ranks)]
        if quantization := (formats(case.architecture.router) | fp8_formats())[case.form].quantization:
            flags += ["--quantization", quantization]
        jobs.append({"flags": flags, "output": str(made / f"{case}.json")})
    return jobs


def hybrid_job(made: Path, name: str, ranks: int) -> dict[str, Any]:
    flags = ["--model", str(made / name), "--tensor-parallel-size", str(ranks)]
    flags += ["--block-size", "128", "--language-model-only"]
    return {"flags": flags, "output": str(made / f"{name}.json")}


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


@pytest.mark.long
def test_every_mixture_of_fp8_and_nvfp4_gives_the_twin_s_tokens(tmp_path: Path) -> None:
    """One of them is the shape of unsloth's Qwen3.8-27B-NVFP4: attention and Gated DeltaNet in FP8."""
    twin = quasar.write(tmp_path / HYBRID, mixed=True)
    run_jobs(tmp_path, [*jobs_of(LONG_CASES, tmp_path), hybrid_job(tmp_path, HYBRID, 2)], "0|1", LIMIT_S)
    expect_answers_of(twin, tmp_path, HYBRID)
    for case in LONG_CASES:
        own = AutoModelForCausalLM.from_pretrained(tmp_path / f"{case.model}-twin", dtype=torch.float32).eval()
        expect_answers_of(own, tmp_path, case)
