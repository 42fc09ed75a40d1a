"""Models of kinds that vLLM has since 0.20, small and random, through `voltserve serve`, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from lookalikes.new_kinds import KINDS, write

from .conftest import Service, serving

pytestmark = pytest.mark.e2e

TOKENS = 12
LENGTHS = (1, 3, 40, 17, 70)  # beyond a window of 8 tokens, and beyond a step's 32
FLAGS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--max-model-len", "128")


@pytest.fixture(
    scope="module", params=[name if name == "laguna" else pytest.param(name, marks=pytest.mark.long) for name in KINDS]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    twin = write(KINDS[request.param], folder / "model", folder / "twin")
    with serving(folder / "log", *FLAGS, model=str(folder / "model"), VLLM_CPU_KVCACHE_SPACE="1") as started:
        yield started, twin


def complete(service: Service, prompt: list[int]) -> tuple[list[int], list[float]]:
    model = httpx.get(f"{service.url}/v1/models", timeout=10).json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{service.url}/v1/completions", json=body | {"logprobs": 0, "return_token_ids": True}, timeout=120
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_greedy_tokens_and_their_probabilities_are_the_twin_s(served: tuple[Service, Any]) -> None:
    """Prompts at once, in parts and whole, twice: states and blocks that are used again."""
    service, twin = served
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 250, (length,), generator=random).tolist() for length in LENGTHS] * 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: complete(service, prompt), prompts))
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(logprobs), expected, rtol=0, atol=5e-3
        )  # Nemotron-H's states of Mamba: 2e-3
