"""The real engine on two machines."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.ray_nodes import RayCluster
from tests.cluster.service import REAL, ROOT, serving

MODEL = ROOT / "models" / "smollm2-nvfp4"


@pytest.mark.e2e
def test_a_model_answers_from_two_machines(cluster: RayCluster) -> None:
    assert MODEL.is_dir(), f"{MODEL} is not there; `make models/smollm2-nvfp4` makes it"
    cluster.start_head(cpus=0)
    for number in range(2):
        cluster.start_worker(f"worker{number}")
    flags = {"model": str(MODEL), "served-model-name": ["smollm2"], "max-model-len": 512}
    with serving(cluster, {"name": "smollm2", "flags": flags, "replicas": 2}, command=REAL) as service:
        hosts = service.wait_for_replicas(2)
        assert len(set(hosts)) == 2
        before = service.tokens()
        for _ in range(4):
            body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
            assert "Paris" in answer.json()["choices"][0]["text"]
        after = service.tokens()
        assert sum(after.values()) - sum(before.values()) >= 16
        decisions = {one["node"]: {found["what"] for found in one["decisions"]} for one in service.health()[1]}
        assert all("NVFP4 linear layers" in found for found in decisions.values()), decisions
