"""The service on two ranks, as a user starts it, with a small mixture of experts: one rank's process is killed."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from lookalikes.random_models import QWEN3_MOE, write_model, write_tokenizer
from tests.waiting import wait_until

from .conftest import Service, serving

pytestmark = pytest.mark.e2e


def ask(service: Service, model: str) -> str:
    body = {"model": model, "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_a_killed_rank_turns_health_to_503_with_the_reason_and_the_service_comes_back(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    write_model(Path(model), tmp_path / "twin", QWEN3_MOE, "compressed-tensors")
    write_tokenizer(Path(model))
    flags = ("--tensor-parallel-size", "2", "--max-model-len", "128", "--max-num-batched-tokens", "128")
    with serving(tmp_path / "log", *flags, model=model) as service:
        text = ask(service, model)
        ranks = {p.cmdline()[0]: p for p in service.processes() if p.cmdline()[0].startswith("VLLM::Worker")}
        assert ranks.keys() == {"VLLM::Worker_TP0", "VLLM::Worker_TP1"}
        ranks["VLLM::Worker_TP1"].kill()
        _, body = wait_until(lambda: (h := service.health()) and h[0] == 503 and h, 10, "503 after a rank was killed")
        wait_until(lambda: (h := service.health()) and h[1]["diagnosis"], 20, "the engine has ended and said why")
        _, body = service.health() or (0, {})
        assert "Worker proc VllmWorker-1 died unexpectedly" in body["last_exit"]
        assert body["diagnosis"]["id"] == "rank-died"
        _, alive = psutil.wait_procs(list(ranks.values()), timeout=10)
        assert not alive, "the other rank ends with it"
        service.wait_ready()
        assert ask(service, model) == text
        assert service.metric("voltserve_engine_restarts_total") == 1
