"""Norms that scale by 1 + w (Gemma's, Qwen3.5's), in few operations.

vLLM relies on torch.compile to fuse them at the first step. Without it each is a chain of about nine operations, twice
per layer. Here the factor is computed once. torch's fused norm does the rest, or voltserve_kernels on a CPU.
"""

from functools import cache

import torch
from torch.nn import functional
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from engine.ops import kernel_devices


class UnitOffsetRMSNorm(GemmaRMSNorm):  # type: ignore[misc]  # vLLM's classes are untyped
    """x / sqrt(mean(x²) + eps) * (1 + w) over the last dimension. A residual is added to x first."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        self._forward_method = self.forward_fused
        self._cpu_kernels = "cpu" in kernel_devices()
        self._factor: torch.Tensor | None = None

    def forward_fused(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x [..., hidden_size]. With a residual it also returns the sum.

        The sum is float32 if x is float16, where it may overflow (Gemma's does). voltserve_kernels overwrites x and the
        residual.
        """
        if self._factor is None:  # at the first call, when the weights are loaded
            self._factor = 1.0 + self.weight.data.float()
        on_kernels = x.is_cpu and x.dtype == torch.float32 and self._cpu_kernels
        if residual is None:
            return self._on_kernels(x) if on_kernels else self._normalized(x, x.dtype)
        if on_kernels and x.is_contiguous() and residual.is_contiguous() and residual.dtype == x.dtype:
            torch.ops.voltserve.add_rms_norm(x, residual, self._factor, self.variance_epsilon)
            return x, residual
        total = (residual.float() if x.dtype == torch.float16 else residual) + x
        return self._normalized(total, x.dtype), total

    def _on_kernels(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.voltserve.rms_norm(x.contiguous(), self._factor, self.variance_epsilon)
        return y

    def _normalized(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self._factor, self.variance_epsilon).to(dtype)


@cache
def register() -> None:
    """Makes vLLM use the layer above. A second call does nothing."""
    GemmaRMSNorm.register_oot(UnitOffsetRMSNorm)
