"""Layers of vLLM for which voltserve_kernels has a faster CPU implementation, in float32.

On a CPU, vLLM computes norms and activations as chains of elementwise torch operations. They dominate a decoding step
of a small model. We register subclasses at vLLM's extension point for out-of-tree layers. Other dtypes stay with vLLM.
"""

from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from engine import progress
from engine.ops import kernel_devices


class CpuRMSNorm(RMSNorm):  # type: ignore[misc]  # vLLM's classes are untyped
    """x / sqrt(mean(x²) + eps) * weight over the last dimension. A residual is added to x first."""

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x [..., hidden_size]. With a residual it returns the sum, too, and overwrites both inputs."""
        tensors = (x, self.weight) if residual is None else (x, self.weight, residual)
        if self.variance_size_override is not None or not all(map(_is_plain_float32, tensors)):
            native: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.forward_native(x, residual)
            return native
        if residual is None:
            y: torch.Tensor = torch.ops.voltserve.rms_norm(x, self.weight, self.variance_epsilon)
            return y
        torch.ops.voltserve.add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual


class CpuSiluAndMul(SiluAndMul):  # type: ignore[misc]  # vLLM's classes are untyped
    """silu(a) * b with x = (a, b)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._forward_method = self.forward_cpu

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 d] to [..., d]."""
        if not _is_plain_float32(x):
            native: torch.Tensor = self.forward_native(x)
            return native
        y: torch.Tensor = torch.ops.voltserve.silu_and_mul(x)
        return y


@cache
def register() -> None:
    """Makes vLLM use the layers above if voltserve_kernels has code for the CPU. A second call does nothing."""
    if "cpu" not in kernel_devices():
        return
    RMSNorm.register_oot(CpuRMSNorm)
    SiluAndMul.register_oot(CpuSiluAndMul)
    progress.decision("norms and activations", "kernels", "voltserve_kernels have code for the CPU")


def _is_plain_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()
