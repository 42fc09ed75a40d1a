"""vLLM's Ray executor on CPUs, so that a model split over machines can be tried without GPUs.

vLLM 0.28.0 prevents this in four ways. Each is handled here:

- The CPU platform replaces `ray` by `mp` (vllm/platforms/cpu.py).
- It has no name for its device among Ray's resources.
- A CPU worker leaves its device unset, which the executor reads in the thread that runs steps
  (vllm/v1/executor/ray_utils.py).
- Workers use shared memory even if they are on different machines.
"""

import os
from typing import TYPE_CHECKING

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.utils.network_utils import get_ip
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The only device name that Ray accepts for a node without such devices: `ray start --num-gpus 1`.
DEVICE_KEY = "GPU"
WORKER = f"{__name__}.RayCpuWorker"
CHANNEL = "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE"


class RayCpuWorker(CPUWorker):  # type: ignore[misc]  # vLLM's classes are untyped
    """A CPU worker that sets its device."""

    def init_device(self) -> None:
        """As in vLLM, then sets the device."""
        super().init_device()
        self.device = torch.device("cpu")


class MachineCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's communicator, which uses shared memory only if all workers of a group have the same address."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        addresses = [""] * self.world_size
        torch.distributed.all_gather_object(addresses, get_ip(), group=self.device_group)
        return len(set(addresses)) == 1 and super()._all_group_ranks_share_shm_group_name()


def use(config: "VllmConfig") -> None:
    """Changes the configuration so that Ray starts the workers."""
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.worker_cls = WORKER
    # Stages exchange data through Ray's memory and network, since NCCL takes only GPUs.
    os.environ.setdefault(CHANNEL, "shm")
