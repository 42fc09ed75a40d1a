"""A DFlash draft through `voltserve serve`: it is asked and judged, and greedy texts are those without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lookalikes.draft import BLOCK, write_dflash
from lookalikes.random_models import QWEN3, write_model, write_tokenizer

from .conftest import serving
from .test_new_kinds import FLAGS, complete

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_greedy_tokens_with_a_dflash_draft_are_those_without(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft-dflash"
    write_model(model, tmp_path / "twin", QWEN3, "compressed-tensors")
    write_tokenizer(model)
    write_dflash(draft, model)
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 250, (length,), generator=random).tolist() for length in (1, 4, 40)]
    config = json.dumps({"method": "dflash", "model": str(draft), "num_speculative_tokens": BLOCK - 1})
    answers = []
    for name, flags in (("alone", ()), ("drafted", ("--speculative-config", config))):
        with serving(tmp_path / name, *FLAGS, *flags, model=str(model), VLLM_CPU_KVCACHE_SPACE="1") as service:
            answers.append([complete(service, prompt)[0] for prompt in prompts])
            guessed = service.metric("vllm:spec_decode_num_draft_tokens_total") if flags else 0
    assert answers[0] == answers[1]
    assert guessed > 0
