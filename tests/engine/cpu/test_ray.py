"""What keeps vLLM's CPU build from Ray's executor, and what is done about it."""

from types import SimpleNamespace

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

from engine.cpu import ray as cpu_ray
from engine.cpu.platform import RecordingCpuPlatform


@pytest.mark.parametrize(("asked", "kept"), [("ray", "ray"), ("mp", "mp")])
def test_ray_stays_where_it_was_asked_for(asked: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CpuPlatform,
        "check_and_update_config",
        classmethod(lambda cls, config: setattr(config.parallel_config, "distributed_executor_backend", "mp")),
    )
    environment: dict[str, str] = {}
    monkeypatch.setattr("engine.cpu.ray.os.environ", environment)
    parallel = SimpleNamespace(distributed_executor_backend=asked, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    cache = SimpleNamespace(cache_dtype="auto")
    config = SimpleNamespace(parallel_config=parallel, cache_config=cache, model_config=None)
    RecordingCpuPlatform.check_and_update_config(config)
    assert parallel.distributed_executor_backend == kept
    assert (parallel.worker_cls == cpu_ray.WORKER) == (asked == "ray")
    assert environment == ({cpu_ray.CHANNEL: "shm"} if asked == "ray" else {})


def test_the_classes_that_are_named_exist() -> None:
    assert resolve_obj_by_qualname(cpu_ray.WORKER) is cpu_ray.RayCpuWorker
    named = RecordingCpuPlatform.get_device_communicator_cls()
    assert resolve_obj_by_qualname(named) is cpu_ray.MachineCommunicator


@pytest.mark.parametrize(("addresses", "shared"), [(["a", "a"], True), (["a", "b"], False)])
def test_memory_is_shared_by_workers_of_one_machine_only(
    addresses: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(into: list[str], own: str, group: object) -> None:
        into[:] = addresses

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("engine.cpu.ray.CpuCommunicator._all_group_ranks_share_shm_group_name", lambda self: True)
    group = object.__new__(cpu_ray.MachineCommunicator)
    group.world_size, group.device_group = 2, None
    assert group._all_group_ranks_share_shm_group_name() is shared
