"""One model split over two machines by vLLM's Ray executor: half the layers on each, with the real engine on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.ray_nodes import BIN, RayCluster
from tests.waiting import wait_until

MODEL = Path(__file__).parents[2] / "models/smollm2-nvfp4"
PORT = 8000
READY_LIMIT_S = 400  # bounds on hangs: two engines load on two cores
ANSWER_LIMIT_S = 120
OVER_TWO = ("--pipeline-parallel-size=2", "--distributed-executor-backend=ray")


def health(url: str) -> dict[str, Any]:
    try:
        return {**httpx.get(f"{url}/health", timeout=10).json()}
    except httpx.TransportError:
        return {}


def serve(cluster: RayCluster, *flags: str) -> str:
    """The URL of a service that is ready."""
    assert cluster.head is not None
    log = cluster.folder / "serve.log"
    command = [str(BIN / "voltserve"), "serve", f"--model={MODEL}", "--served-model-name=small", "--preset=cpu-smoke",
               "--host=0.0.0.0", f"--port={PORT}", "--max-model-len=1024", *flags]  # fmt: skip
    process = cluster.head.start(command, cluster.environment(cluster.head), log)
    url = f"http://{cluster.head.address}:{PORT}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return health(url).get("state") == "ready"

    wait_until(ready, READY_LIMIT_S, f"ready; see {log}")
    return url


def ask(url: str, **more: Any) -> httpx.Response:
    body = {"model": "small", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S)


def complete(url: str, **more: Any) -> str:
    reply = ask(url, **more)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.mark.timeout(1200)
def test_a_model_split_over_two_machines_answers_as_on_one(cluster: RayCluster) -> None:
    cluster.start_head(gpus=1)  # one place for a worker on each: engine/cpu/ray.py
    cluster.start_worker("second", gpus=1)
    url = serve(cluster, *OVER_TWO)
    assert "Paris" in complete(url)
    assert "Paris" in complete(url, logprobs=1)  # what once stopped it for ever (engine/patches.py, OVER_RAY)


@pytest.mark.timeout(1200)
def test_a_split_model_whose_machine_is_lost_comes_back_on_another(cluster: RayCluster) -> None:
    cluster.start_head(gpus=1)
    second = cluster.start_worker("second", gpus=1)
    url = serve(cluster, *OVER_TWO)
    cluster.machines.kill(second)
    cluster.wait_for(second, alive=False)
    reply = ask(url)  # only a step shows that a stage is gone
    assert reply.status_code >= 500, reply.text
    assert "error" in reply.json()
    cluster.start_worker("third", gpus=1)
    wait_until(lambda: health(url).get("state") == "ready", READY_LIMIT_S, f"ready again; see {cluster.folder}")
    assert "Paris" in complete(url)
