"""A look-alike of the 27B, with Gated DeltaNet layers, through `voltserve serve`, against transformers' model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from lookalikes.quasar import write
from lookalikes.quasar_config import SMALL

from .conftest import Service, serving

pytestmark = pytest.mark.e2e

TOKENS = 16
CHUNK = 64  # tokens per step, so that long prompts are computed in parts
LENGTHS = (1, 3, 4, 70, 300, 17, 130, 2)
BLOCKS = 36  # so few that each slot soon has its second request


@pytest.fixture(scope="module")
def lookalike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3_5ForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("quasar")
    return folder, write(folder)


@pytest.fixture(scope="module")
def hybrid(lookalike: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "4", "--max-model-len", "512")
    few = ("--num-gpu-blocks-override", str(BLOCKS))
    with serving(tmp_path_factory.mktemp("serve") / "log", *flags, *few, model=str(lookalike[0])) as started:
        yield started


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(2, SMALL.vocabulary - 8, (length,), generator=random).tolist() for length in LENGTHS]


def complete(service: Service, model: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    body = {"model": str(model), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{service.url}/v1/completions", json=body | {"logprobs": 0, "return_token_ids": True}, timeout=120
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def logits_of(twin: Qwen3_5ForConditionalGeneration, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], from which each of `tokens` should have been chosen."""
    with torch.inference_mode():
        logits: torch.Tensor = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits


def test_what_was_chosen_is_said(hybrid: Service) -> None:
    status, health = hybrid.health() or (0, {})
    assert status == 200
    chosen = {made["what"]: made["choice"] for made in health["decisions"]}
    assert chosen["images and video"] == "not served"
    assert chosen["Gated DeltaNet layers"] == chosen["NVFP4 linear layers"] == "kernels"


def test_greedy_tokens_and_their_probabilities_are_the_twin_s(
    hybrid: Service, lookalike: tuple[Path, Qwen3_5ForConditionalGeneration]
) -> None:
    """Many at once, more than run together: decoding, whole prompts and parts of prompts share steps, and slots."""
    folder, twin = lookalike
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda prompt: complete(hybrid, folder, prompt), prompts()))
    for prompt, (tokens, logprobs) in zip(prompts(), answers, strict=True):
        logits = logits_of(twin, prompt, tokens)
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("length", [1, 70])
def test_a_slot_used_before_starts_from_nothing(
    hybrid: Service, lookalike: tuple[Path, Qwen3_5ForConditionalGeneration], length: int
) -> None:
    """A prompt of one token, too, whose first step looks like one of decoding."""
    folder, twin = lookalike
    prompt = prompts()[LENGTHS.index(length)]
    for _ in range(3):
        tokens, _ = complete(hybrid, folder, prompt)
        assert tokens == logits_of(twin, prompt, tokens).argmax(-1).tolist()
