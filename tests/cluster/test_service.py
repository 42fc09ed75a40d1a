"""A service on several machines: what becomes of requests when machines die or are cut off, and when models change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import Machine
from tests.cluster.ray_nodes import BIN, RayCluster
from tests.cluster.service import PORT, ROOT, Load, report, serving
from tests.server.conftest import make_model

ANSWER = {"tokens": 12, "first_delay": 0.3, "delay": 0.05}
BROKEN = ("stream", True, "engine_unavailable")  # a stream that had begun, ended with an error event


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    """One model of the fake engine, a replica a machine."""
    folder = make_model(tmp_path / "model", answer=ANSWER)
    flags = {"model": str(folder), "served-model-name": ["m"], "preset": "cpu-smoke"}
    return {"name": "m", "flags": flags, "replicas": 2, "drain": 60}


def start(cluster: RayCluster, workers: int) -> list[Machine]:
    """A head that takes no replicas, and workers that take one each."""
    cluster.env = {"PYTHONPATH": str(ROOT)}
    cluster.start_head(cpus=0)
    return [cluster.start_worker(f"worker{number}") for number in range(workers)]


def test_a_machine_that_dies_takes_no_request_with_it_that_had_not_begun(
    cluster: RayCluster, model: dict[str, Any]
) -> None:
    workers = start(cluster, 3)
    with serving(cluster, model) as service:
        hosts = service.wait_for_replicas(2)
        assert len(set(hosts)) == 2
        with Load(service.url, 12, {"model": "m", "prompt": "Hi", "fake": {"tokens": 40}}) as load:
            time.sleep(3)
            assert all(count > 0 for count in service.tokens().values()), "both replicas work"
            victim = next(worker for worker in workers if worker.address == hosts[0])
            cluster.machines.kill(victim)
            service.wait_for_replicas(2, "again", but_not_on=victim.address)
            time.sleep(2)
        report("a machine killed under load", all=load)
        assert {(one.kind, one.begun, one.end) for one in load.failed()} == {BROKEN}
        assert len(load.failed()) <= 6, "no more than were under way there"
        assert any(one.fine for one in load.outcomes[-4:])


def test_a_machine_that_is_cut_off_is_left_out_and_taken_back(cluster: RayCluster, model: dict[str, Any]) -> None:
    workers = start(cluster, 2)
    with serving(cluster, model) as service:
        hosts = service.wait_for_replicas(2)
        lost = next(worker for worker in workers if worker.address == hosts[0])
        with Load(service.url, 6, {"model": "m", "prompt": "Hi"}) as load:
            time.sleep(2)
            cluster.machines.cut(lost)
            service.wait_for_replicas(1, "while one is cut off", but_not_on=lost.address)
            cluster.wait_for(lost, alive=False)
            cluster.machines.heal(lost)
            service.wait_for_replicas(2, "after the network is whole again")
        report("a machine cut off under load and healed", all=load)
        assert {(one.kind, one.begun, one.end) for one in load.failed()} <= {BROKEN}


def test_a_new_version_of_a_model_comes_without_a_failed_request(
    cluster: RayCluster, model: dict[str, Any], tmp_path: Path
) -> None:
    start(cluster, 3)
    newer = make_model(tmp_path / "newer", answer={**ANSWER, "word": "new"})
    with serving(cluster, model) as service:
        service.wait_for_replicas(2)
        with Load(service.url, 6, {"model": "m", "prompt": "Hi"}) as load:
            time.sleep(2)
            service.update(flags={**model["flags"], "model": str(newer)})
            time.sleep(2)
            last = time.monotonic()
            time.sleep(3)
        report("a new version under load", all=load)
        assert not load.failed()
        assert any("new" not in one.words for one in load.outcomes)
        assert all("new" in one.words for one in load.outcomes if one.began_at > last)


def test_replicas_come_and_go_with_the_requests(cluster: RayCluster, model: dict[str, Any]) -> None:
    start(cluster, 3)
    del model["replicas"]
    model["autoscaling"] = {"min": 1, "max": 3, "requests_per_replica": 3, "up_after": 1, "down_after": 5}
    with serving(cluster, model) as service:
        service.wait_for_replicas(1)
        with Load(service.url, 1, {"model": "m", "prompt": "Hi"}) as light:
            with Load(service.url, 9, {"model": "m", "prompt": "Hi"}) as heavy:
                service.wait_for_replicas(3, "under load")
            service.wait_for_replicas(1, "without it")
        report("scaled from 1 to 3 to 1", heavy=heavy, light=light)
        assert not heavy.failed()
        assert not light.failed()


def test_a_version_that_does_not_come_up_leaves_the_one_before_serving(
    cluster: RayCluster, model: dict[str, Any], tmp_path: Path
) -> None:
    start(cluster, 2)
    model["replicas"] = 1
    with serving(cluster, model) as service:
        service.wait_for_replicas(1)
        with Load(service.url, 4, {"model": "m", "prompt": "Hi"}) as load:
            for _ in range(2):  # the second time nothing in the file has changed
                with pytest.raises(AssertionError, match=r"(?s)exit code 1.*does not exist"):
                    service.update(flags={**model["flags"], "model": str(tmp_path / "nowhere")})
                assert service.ready_on()
            status = cluster.run(str(BIN / "voltserve"), "cluster", "status")
            assert "does not exist" in status
            service.update(**model)
            service.wait_for_replicas(1, "after the way back")
        report("a version that does not come up, under load", all=load)
        assert not load.failed()


def test_a_second_gateway_serves_the_same_replicas(cluster: RayCluster, model: dict[str, Any]) -> None:
    start(cluster, 1)
    model["replicas"] = 1
    with serving(cluster, model) as first:
        first.wait_for_replicas(1)
        with serving(cluster, model, "--gateway-only", port=PORT + 1) as second:
            second.wait_for_replicas(1)
            assert [one["name"] for one in first.health()[1]] == [one["name"] for one in second.health()[1]]
            loads = [Load(each.url, 2, {"model": "m", "prompt": "Hi"}) for each in (first, second)]
            with loads[0], loads[1]:
                time.sleep(2)
            report("two gateways", first=loads[0], second=loads[1])
            assert all(load.outcomes and not load.failed() for load in loads)
