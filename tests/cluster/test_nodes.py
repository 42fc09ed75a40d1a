"""The harness itself, with bare Ray: what the other tests of this folder rely on."""

from __future__ import annotations

import sys

from tests.cluster.ray_nodes import RayCluster
from tests.waiting import wait_until

WHERE = """
import ray, socket
ray.init(log_to_driver=False)
where = ray.remote(num_cpus=0, resources={"mark": 1})(lambda: socket.gethostname())
print(ray.get(where.remote()))
"""


def test_work_goes_to_the_machine_that_has_the_resource(cluster: RayCluster) -> None:
    cluster.start_head()
    cluster.start_worker("plain")
    cluster.start_worker("marked", resources={"mark": 1})
    assert cluster.run(sys.executable, "-c", WHERE) == "marked\n"


def test_a_machine_that_is_cut_off_is_given_up_and_comes_back_when_healed(cluster: RayCluster) -> None:
    cluster.start_head()
    worker = cluster.start_worker("worker")
    cluster.machines.cut(worker)
    cluster.wait_for(worker, alive=False)
    cluster.machines.heal(worker)
    cluster.wait_for(worker, alive=True)


def test_a_machine_that_is_killed_is_given_up_and_leaves_nothing_running(cluster: RayCluster) -> None:
    cluster.start_head()
    worker = cluster.start_worker("worker")
    cluster.machines.kill(worker)
    cluster.wait_for(worker, alive=False)
    wait_until(
        lambda: all(one.poll() is not None for one in worker.processes), 10, "all processes of the machine ended"
    )
