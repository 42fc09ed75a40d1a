"""vLLM's Ray executor on CPUs, which vLLM's CPU build has no use for: a model split over machines, tried without GPUs.

Four things stand in its way in vLLM 0.19.1, and each is dealt with here. The CPU platform puts `mp` where `ray` is
asked for (vllm/platforms/cpu.py); it has no name for its device among Ray's resources; a CPU worker leaves unset the
device that the executor sets again in the thread which runs steps (vllm/v1/executor/ray_utils.py); and workers talk
through shared memory although they are on different machines.
"""

import os
from typing import TYPE_CHECKING

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.utils.network_utils import get_ip
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The only one of Ray's names for devices that can be given to a node without any: `ray start --num-gpus 1`.
DEVICE_KEY = "GPU"
WORKER = f"{__name__}.RayCpuWorker"
CHANNEL = "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE"


class RayCpuWorker(CPUWorker):  # type: ignore[misc]  # vLLM's classes are untyped
    """A CPU worker that says which device it is on."""

    def init_device(self) -> None:
        """As vLLM's."""
        super().init_device()
        self.device = torch.device("cpu")


class MachineCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's, whose shared memory is used only where all workers of a group have the same address."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        addresses = [""] * self.world_size
        torch.distributed.all_gather_object(addresses, get_ip(), group=self.device_group)
        return len(set(addresses)) == 1 and super()._all_group_ranks_share_shm_group_name()


def use(config: "VllmConfig") -> None:
    """Makes the configuration one whose workers Ray starts."""
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.worker_cls = WORKER
    os.environ.setdefault(
        CHANNEL, "shm"
    )  # between stages: through Ray's memory and network, where NCCL takes only GPUs
