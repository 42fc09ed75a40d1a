"""vLLM's communicator of CUDA ranks, with our all-reduce if the platform chose it. vLLM imports it by name."""

from typing import Any, cast, get_args

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from engine import progress, volta
from engine.collective.all_reduce import AllReduce, AllReduceError
from engine.ops import add_rms_norm


class VoltaCommunicator(CudaCommunicator):  # type: ignore[misc]  # vLLM's classes are untyped
    """Tensor-parallel sums up to 1 MiB go through one kernel of ours, everything else through vLLM's."""

    def __init__(self, cpu_group: Any, device: torch.device, **rest: Any) -> None:
        """As vLLM calls it, on all ranks of `cpu_group`."""
        super().__init__(cpu_group=cpu_group, device=device, **rest)
        self._ours: AllReduce | None = None
        config = get_current_vllm_config_or_none()
        chosen = config.additional_config.get(volta.ALL_REDUCE_KEY) if config is not None else None
        if self.unique_name.startswith("tp:") and self.world_size > 1 and chosen in get_args(volta.Transport):
            self._ours = start(cpu_group, device, cast("volta.Transport", chosen))

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `input_`."""
        if self._ours is not None and self._ours.takes(input_):
            return self._ours(input_)
        y: torch.Tensor = super().all_reduce(input_)
        return y

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The RMS norm of all ranks' x plus `residual`, float16 [M, hidden]. The sum is written to `residual`."""
        if self._ours is not None and self._ours.takes_rows(x):
            return self._ours.rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)


def start(group: Any, device: torch.device, transport: volta.Transport) -> AllReduce | None:
    """Starts and reports our all-reduce if its trial succeeds. All ranks get the same answer."""
    import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve

    try:
        ours = AllReduce(group, device, transport)
        problem = ours.trial()
    except AllReduceError as error:
        problem = str(error)
    kept = progress.settle(volta.keep_all_reduce(transport, problem))
    return ours if kept.choice == transport else None
