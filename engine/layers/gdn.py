"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5 and their like) on voltserve_kernels.

vLLM computes them with Triton kernels. Those need a GPU with matrix units that a V100 lacks (docs/log.md). We replace
its layer class through its extension point for out-of-tree layers. Projections, weights and caches stay vLLM's. So does
the metadata, with two corrections.
"""

from functools import cache
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from engine import progress
from engine.limits import CONV_TAPS
from engine.ops import kernel_devices
from quant.errors import QuantError

# The dtype that the kernels compute in, by device.
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
NO_REQUEST = -1  # as a slot (kernels/contracts/gdn.h)


class Builder(GDNAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's metadata, corrected for steps in which no request has more than one token.

    vLLM takes each request of such a step for one that continues. But a prompt may have one token, or a full step may
    leave one token to a prompt's first part. Its slot holds the states of an earlier request, so they are zeroed here.
    Kernels cannot do that: a captured graph of decoding steps treats every request alike.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """As vLLM calls it."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *further: Any, **options: Any
    ) -> GDNAttentionMetadata:
        """The step's metadata. `further`, `options`: of speculative decoding, which the layer refuses."""
        step = super().build(common_prefix_len, common_attn_metadata, *further, **options)
        if not step.num_prefills:
            tokens = common_attn_metadata.query_start_loc_cpu.diff()
            slots = step.non_spec_state_indices_tensor
            # vLLM gives rows of padding its null block, which is a slot like any other to our kernels.
            slots[int(tokens.count_nonzero()) :].fill_(NO_REQUEST)
            first = (tokens == 1) & (common_attn_metadata.seq_lens_cpu_upper_bound == 1)
            if first.any():
                self._zero(slots[first.nonzero().squeeze(1).to(slots.device)])
        return step

    def _zero(self, slots: torch.Tensor) -> None:
        """Zeroes the states in `slots` of all layers that share this metadata."""
        for layer in self._layers:
            for states in layer.kv_cache:
                states.index_fill_(0, slots.long(), 0)


class Backend(GDNAttentionBackend):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's, with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The builder of each step's metadata."""
        return Builder


class GatedDeltaNet(QwenGatedDeltaNetAttention):  # type: ignore[misc]  # vLLM's classes are untyped
    """vLLM's layer, with convolution and delta rule by torch.ops.voltserve."""

    def __init__(self, config: Any, vllm_config: VllmConfig, **options: Any) -> None:
        """Raises QuantError if the kernels do not take the layer."""
        super().__init__(config, vllm_config, **options)
        self._forward_method = self.forward_cuda  # on any device: projections, then `_forward_core`
        dtype = DTYPES[current_platform.device_type]
        _, state_dtype = self.get_state_dtype()
        bits = str(dtype).removeprefix("torch.")
        expectations = (
            (vllm_config.speculative_config is None, "no speculative decoding", "Leave out --speculative-config"),
            (vllm_config.model_config.dtype == dtype, f"--dtype {bits} on this device", f"Serve with --dtype {bits}"),
            (state_dtype == torch.float32, "float32 states", "Serve with --mamba-ssm-cache-dtype float32"),
            (self.conv_kernel_size == CONV_TAPS, f"a convolution over {CONV_TAPS} tokens", "Choose another model"),
            (self.head_k_dim == self.head_v_dim, "keys and values of one size", "Choose another model"),
            (self.activation in ("silu", "swish"), "SiLU after the convolution", "Choose another model"),
        )
        for holds, expected, remedy in expectations:
            if not holds:
                raise QuantError(f"{self.prefix}: Gated DeltaNet kernels expect {expected}, got otherwise", remedy)
        # This weight belongs to a convolution: no linear method may process it.
        self.conv1d.quant_method = None
        # Kept as stored, since rounding to 16 bits would change how long a state remembers.
        self.dt_bias = Parameter(torch.ones(self.num_v_heads // self.tp_size, dtype=torch.float32), requires_grad=False)
        self.dt_bias.weight_loader = sharded_weight_loader(0)  # type: ignore[attr-defined]
        progress.decision("Gated DeltaNet layers", "kernels", "voltserve_kernels have code for this device")

    def get_attn_backend(self) -> type[Backend]:
        """Where vLLM finds the builder of this layer's metadata."""
        return Backend

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Everything between the projections: convolution, gates and delta rule.

        mixed_qkv is [T, 2 key dims + value dims]; b and a are [T, value heads]. The result is written to core_attn_out
        [T, value heads, value dim], except for rows of padding.
        """
        step = get_forward_context().attn_metadata
        if step is None:  # a trial run that measures memory
            torch.empty_like(mixed_qkv)
            return
        step = step[self.prefix]
        slots, starts, continued = step.non_spec_state_indices_tensor, None, None
        tokens = step.num_actual_tokens
        if step.num_prefills:
            starts, continued = step.non_spec_query_start_loc, step.has_initial_state
            slots = slots[: continued.shape[0]]
        else:
            # One token per request. Padding of a captured graph has negative slots, or none.
            slots = slots[:tokens]
            tokens = slots.shape[0]
        convolution_state, state = self.kv_cache
        ops = torch.ops.voltserve
        weight = self.conv1d.weight.squeeze(1)
        qkv = ops.causal_conv1d(mixed_qkv[:tokens], weight, convolution_state, slots, starts, continued)
        gates = (a[:tokens], b[:tokens], self.A_log, self.dt_bias)
        heads = self.num_k_heads // self.tp_size
        ops.gated_delta_rule(qkv, *gates, state, slots, starts, continued, heads, core_attn_out[:tokens])


@cache
def register() -> None:
    """Makes vLLM use the layer above if voltserve_kernels has code for this device. A second call does nothing."""
    if current_platform.device_type in kernel_devices():
        QwenGatedDeltaNetAttention.register_oot(GatedDeltaNet)
