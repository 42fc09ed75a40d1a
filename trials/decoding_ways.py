"""The ways in which the worker computes a step, switched while the engine runs."""

from typing import Any

import torch
from torch.nn import functional
from vllm.distributed.parallel_state import get_tp_group

from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.steps import recording
from engine.steps.graph_check import GraphSwitch
from trials import profiles


class Bench(profiles.Profilers, GraphSwitch):
    """The methods that vLLM's worker gains for these measurements."""

    device: Any
    _modules = False

    def voltserve_way(self, way: str) -> int:
        """From now on computes steps in this way, in graphs captured anew; returns how many layers multiply so."""
        methods = [
            module.quant_method
            for module in self.model_runner.get_model().modules()
            if isinstance(getattr(module, "quant_method", None), QuasarNvfp4LinearMethod)
        ]
        product = dequantize_and_multiply if way == "reference" else torch.ops.voltserve.nvfp4_linear.default
        for method in methods:
            method._gemm = product
        communicator = get_tp_group().device_communicator
        if communicator is not None:  # one rank has none
            self._own_all_reduce = getattr(self, "_own_all_reduce", communicator._ours)
            communicator._ours = None if way == "nccl" else self._own_all_reduce
        self._modules = way in OF_MODULES
        if self.voltserve_captured_sizes():
            self.voltserve_replay(True)
            self.model_runner.model.clear_graphs()
            torch.cuda.empty_cache()
            self.model_runner.capture_model()
        return len(methods)

    def voltserve_replay(self, wanted: bool) -> None:
        """As the original, but for ways that run the model's modules."""
        super().voltserve_replay(wanted)
        if self._modules:
            recording.use_recorded(self.model_runner.get_model(), False)

    def voltserve_memory(self) -> dict[str, int]:
        """Bytes on this GPU."""
        held = {tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.get_model().parameters()}
        model = self.model_runner.get_model()
        embedding = getattr(model, "language_model", model).model.embed_tokens.weight
        free, total = torch.cuda.mem_get_info()
        return {
            "weights": sum(held.values()),
            "weights_read_a_step": sum(held.values()) - embedding.nbytes,
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "used_on_the_gpu": total - free,
        }


WAYS = ("kernels", "unfused", "reference", "nccl")
OF_MODULES = ("unfused", "reference")


def dequantize_and_multiply(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, group: int, bias: Any
) -> torch.Tensor:
    """x Wᵀ + bias, with W written out in float16 first."""
    weight = torch.ops.voltserve.nvfp4_dequantize(packed, scales, factor, group, torch.float16)
    return functional.linear(x, weight, bias)
