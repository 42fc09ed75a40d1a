"""Experts in 16 or 32 bits on CPUs: one expert after the other, each as two matrix multiplications of its tokens.

vLLM's own method needs compiled kernels that are not installed (engine/operators).
"""

from functools import cache
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


class CpuExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]  # vLLM's classes are untyped
    """y = Σ over a token's experts e of weight[e] * (W2_e activation(W13_e x + b13_e) + b2_e)."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)  # vLLM's would look for compiled kernels

    @property
    def is_monolithic(self) -> bool:
        """True: `apply_monolithic` routes the tokens, since vLLM's router has no kernels here."""
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leaves the weights as loaded: w13_weight [E, N, H] and w2_weight [E, H, I]."""
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [M, H] and router_logits [M, E] to [M, H]."""
        weights, ids = routed(layer, x, router_logits)
        config = ApplyMoEActivationConfig.from_configs(self.moe, self.moe_quant_config)
        biases = [getattr(layer, name, None) for name in ("w13_bias", "w2_bias")]
        y = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            rows, factors = x[tokens], weights[tokens, place, None].to(x.dtype)
            if layer.apply_router_weight_on_input:
                rows, factors = rows * factors, torch.ones_like(factors)
            first, second = (None if bias is None else bias[expert] for bias in biases)
            hidden = functional.linear(rows, layer.w13_weight[expert], first)
            width = hidden.shape[1] // 2 if layer.activation.is_gated else hidden.shape[1]
            activated = hidden.new_empty(len(hidden), width)
            apply_moe_activation(layer.activation, activated, hidden, activation_config=config)
            y.index_add_(0, tokens, functional.linear(activated, layer.w2_weight[expert], second) * factors)
        return y


def routed(layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts by vLLM's rules: their weights, float [M, k], and their numbers, int [M, k].

    Without groups and a function of the model, the rules are those of vLLM's routers for GPUs. Its function for CPUs
    knows softmax alone, and ignores a bias.
    """
    if not layer.use_grouped_topk and layer.custom_routing_function is None:
        bias = layer.e_score_correction_bias
        weights, ids = fused_topk_bias(
            x,
            router_logits,
            layer.scoring_func,
            bias,
            layer.top_k,
            layer.renormalize,
            routed_scaling_factor=1.0 if bias is None else layer.routed_scaling_factor,
        )
        return weights, ids
    weights, ids = select_experts(
        x,
        router_logits,
        layer.top_k,
        layer.use_grouped_topk,
        layer.renormalize,
        layer.topk_group,
        layer.num_expert_group,
        layer.custom_routing_function,
        layer.scoring_func,
        layer.routed_scaling_factor,
        layer.e_score_correction_bias,
    )
    return weights, ids


@cache
def register() -> None:
    """Makes vLLM use the method above. A second call does nothing."""
    UnquantizedFusedMoEMethod.register_oot(CpuExperts)
