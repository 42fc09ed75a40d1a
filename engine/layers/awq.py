"""AWQ models on a V100, computed by the kernels for GPTQ.

vLLM's AWQ kernels have no code for compute capability 7.0, but its gptq_gemm does. Both compute the same weights,
(q - zero) * scale, from different layouts. Eight 4-bit values are packed per int32:

- AWQ (github.com/mit-han-lab/llm-awq): qweight [K, N/8] and qzeros [K/g, N/8] along N; scales [K/g, N].
  From the lowest bits up, an int32 holds columns 0, 2, 4, 6, 1, 3, 5, 7.
- GPTQ, version 2 (github.com/ModelCloud/GPTQModel): qweight [K/8, N] along K and qzeros [K/g, N/8] along N, in order.
"""

from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.awq import AWQConfig, AWQLinearMethod

from engine import progress

NAME = "awq"
BITS, PACKED = 4, 8  # values of 4 bits; 8 to an int32
# The position of each of an int32's eight columns, counted from the lowest bits.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class VoltaAwqConfig(AWQConfig):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's config, with our linear method."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Volta."""
        return 70

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        """The method of a layer. Layers without AWQ weights keep vLLM's choice.

        Raises:
            NotImplementedError: the layer has experts.
        """
        if isinstance(layer, FusedMoE):
            raise NotImplementedError(f"{prefix}: expected linear layers, got AWQ experts. Serve a dense AWQ model")
        method = super().get_quant_method(layer, prefix)
        return AwqOnGptqKernels(self) if isinstance(method, AWQLinearMethod) else method


@register_weight_loader_v2_supported_method
class AwqOnGptqKernels(AWQLinearMethod):  # type: ignore[misc]  # vLLM's classes are untyped
    """Loads as vLLM loads AWQ, then repacks for gptq_gemm."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repacks the loaded weights. Meanwhile the layer takes three times its size."""
        weights = pack(unpack(layer.qweight.data), dim=0)
        zeros = pack(unpack(layer.qzeros.data), dim=1)
        layer.order = torch.empty(0, dtype=torch.int32, device=weights.device)  # no reordering of K
        ops.gptq_shuffle(weights, layer.order, BITS)
        layer.qweight = Parameter(weights, requires_grad=False)
        layer.qzeros = Parameter(zeros, requires_grad=False)
        layer.scales = Parameter(layer.scales.data, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x float16 [..., K] to [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        shuffled = version_2 = True
        y: torch.Tensor = ops.gptq_gemm(
            rows, layer.qweight, layer.qzeros, layer.scales, layer.order, shuffled, version_2, BITS
        )
        if bias is not None:
            y.add_(bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 [R, C/8] to its values, int32 [R, C]."""
    shifts = BITS * torch.tensor(_PLACES, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 0xF).flatten(1)


def pack(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Packs values 0 … 15, int32 [R, C], eight per int32 along `dim`, the first in the lowest bits."""
    rows, columns = values.shape
    eight = values.reshape(-1, PACKED, columns).unbind(1) if dim == 0 else values.reshape(rows, -1, PACKED).unbind(2)
    out = torch.zeros_like(eight[0])
    for place, part in enumerate(eight):
        out |= part << BITS * place
    return out


def register() -> None:
    """Makes vLLM use this config for `awq`."""
    register_quantization_config(NAME)(VoltaAwqConfig)
    progress.decision("AWQ models", "gptq_gemm", "vLLM's AWQ kernels have no code for compute capability 7.0")
