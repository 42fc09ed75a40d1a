"""All decoder layers of a Llama or Qwen model in one operation, for steps of few tokens.

A recorded step (engine/steps/recording.py) still has ten operations per layer, and calls attention through Python. In a
small model the calls take longer than the computation between the GEMMs. `voltserve::decoder_step`
(kernels/contracts/decoder.h) runs all layers in one call, on vLLM's own cache. Larger steps and other models run
operation by operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3MLP, Qwen3Model
from vllm.v1.attention.backend import AttentionType

from engine import progress
from engine.cpu.attention import Attention, Metadata
from engine.cpu.layers import CpuRMSNorm, CpuSiluAndMul
from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.limits import DECODER_HEAD_MULTIPLE, DECODER_MAX_HEAD
from quant.formats.modelopt import PRE_QUANT_SCALE

WHAT = "decoder layers"
# Limits of a step: its tokens, and the positions that are read again for a request's second and later tokens. Beyond
# them vLLM's attention is faster, since it reads a request's positions once for many of its tokens.
MAX_TOKENS = 64
MAX_READ_AGAIN = 16384
# Classes that compute exactly what the operation does: model, decoder, layer, attention, MLP. Subclasses may differ.
MODELS = (
    (LlamaForCausalLM, LlamaModel, LlamaDecoderLayer, LlamaAttention, LlamaMLP),
    (Qwen2ForCausalLM, Qwen2Model, Qwen2DecoderLayer, Qwen2Attention, Qwen2MLP),
    (Qwen3ForCausalLM, Qwen3Model, Qwen3DecoderLayer, Qwen3Attention, Qwen3MLP),
)


class Unfit(Exception):
    """Why a model's layers stay as they are."""


def fuse(model: Module, config: VllmConfig) -> None:
    """Makes `model` run steps of few tokens in one operation if it can. Reports whether it does and why."""
    if config.compilation_config.mode == CompilationMode.NONE:
        return  # the user asked to run module by module
    try:
        decoder = Decoder(model, config)
    except Unfit as why:
        progress.decision(WHAT, "operation by operation", str(why))
        return
    model.forward = decoder.wrap(model.forward)
    progress.decision(WHAT, "one operation", f"in steps of up to {MAX_TOKENS} tokens; beyond, operation by operation")


class Decoder:
    """The decoder of a loaded model as one operation.

    Raises:
        Unfit: the model computes something that the operation does not.
    """

    def __init__(self, model: Any, config: VllmConfig) -> None:
        classes: tuple[type, ...] = next((row for row in MODELS if type(model) is row[0]), ())
        _need(bool(classes), f"{type(model).__name__} is none of {', '.join(row[0].__name__ for row in MODELS)}")
        _need(config.parallel_config.world_size == 1, "ranks add up between layers")
        drafts = config.speculative_config
        reads_layers = drafts is not None and drafts.method in ("eagle3", "dflash")
        _need(not reads_layers, "drafts are made of hidden states between layers")
        _need(
            config.lora_config is None and config.kv_transfer_config is None, "LoRA and KV transfer work within layers"
        )
        self._inner = model.model
        layers = list(self._inner.layers)
        _need(type(self._inner) is classes[1], f"{type(self._inner).__name__} is not {classes[1].__name__}")
        for layer in layers:
            for module, expected in zip((layer, layer.self_attn, layer.mlp), classes[2:], strict=True):
                _need(type(module) is expected, f"{type(module).__name__} is not {expected.__name__}")
        norms = [self._inner.norm, *(norm for layer in layers for norm in _norms(layer))]
        groups = {projection.quant_method.group_size for layer in layers for projection in _projections(layer)}
        eps = {norm.variance_epsilon for norm in norms}
        _need(all(_is_plain(norm) for norm in norms) and len(eps) == 1, "norms differ, or are not in float32")
        _need(len(groups) == 1, "group sizes differ")
        self._attention = [layer.self_attn.attn for layer in layers]
        rotary = layers[0].self_attn.rotary_emb
        _need(all(layer.self_attn.rotary_emb is rotary for layer in layers), "layers rotate differently")
        _need_rotary(rotary)
        self._cos_sin = rotary.cos_sin_cache.float().contiguous()
        tensors = [tensor for layer in layers for tensor in _tensors(layer)]
        first = self._attention[0]
        shape = (groups.pop(), first.num_heads, first.num_kv_heads, eps.pop(), first.impl.scale)
        self._made = torch.ops.voltserve.decoder_make(tensors, self._inner.norm.weight, *shape)

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's `forward`, which runs suitable steps as one operation."""

        def step(
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: torch.Tensor | None = None,
            **others: Any,
        ) -> Any:
            metadata = self._metadata(positions)
            if metadata is None or input_ids is None or inputs_embeds is not None or others:
                return forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)
            return torch.ops.voltserve.decoder_step(
                self._made,
                self._inner.embed_input_ids(input_ids),
                positions,
                self._cos_sin,
                [attention.kv_cache for attention in self._attention],
                metadata.slot_mapping,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
            )

        return step

    def _metadata(self, positions: torch.Tensor) -> Metadata | None:
        """The step's metadata, or None if the operation does not suit it. No layer has a window, so all share one."""
        tokens = positions.shape[0]
        if tokens > MAX_TOKENS or positions.dim() != 1:
            return None
        by_layer = get_forward_context().attn_metadata
        if not isinstance(by_layer, dict):  # a warm-up step
            return None
        metadata: Metadata = by_layer[self._attention[0].layer_name]
        known = metadata.causal and metadata.num_actual_tokens == tokens
        read_again = (metadata.max_query_len - 1) * metadata.max_seq_len
        return metadata if known and read_again <= MAX_READ_AGAIN else None


def _norms(layer: Any) -> list[Any]:
    by_head = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return [layer.input_layernorm, layer.post_attention_layernorm, *(norm for norm in by_head if norm is not None)]


def _projections(layer: Any) -> list[Any]:
    projections = [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    for projection in projections:
        method = projection.quant_method
        on_kernels = isinstance(method, QuasarNvfp4LinearMethod) and method.route.name == "kernels"
        _need(on_kernels, f"{projection.prefix} is not NVFP4 on the kernels")
        _need(getattr(projection, PRE_QUANT_SCALE, None) is None, f"{projection.prefix} scales its input")
    _need(all(projection.bias is None for projection in projections[1:]), "a projection other than q, k, v has a bias")
    _need(isinstance(layer.mlp.act_fn, CpuSiluAndMul), "the activation is not SiLU")
    return projections


def _tensors(layer: Any) -> list[torch.Tensor]:
    """A layer's tensors in the order of `LayerTensor` in kernels/contracts/decoder.h."""
    attention = layer.self_attn
    _need_attention(attention.attn)
    qkv, out, gate_up, down = ([one.packed, one.scales, one.row_factor] for one in _projections(layer))
    none = torch.empty(0)
    bias = attention.qkv_proj.bias
    by_head = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    optional = [none if bias is None else bias, *(none if norm is None else norm.weight for norm in by_head)]
    weights = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    return [weights[0], *qkv, *optional, *out, weights[1], *gate_up, *down]


def _need_attention(attention: Any) -> None:
    impl = attention.impl
    _need(isinstance(impl, Attention) and impl.attn_type == AttentionType.DECODER, "attention is not causal")
    plain = (impl.alibi_slopes, impl.sinks, impl.kv_sharing_target_layer_name) == (None, None, None)
    _need(plain and not impl.sliding_window and not impl.logits_soft_cap, "attention has a window or biases")
    _need(attention.kv_cache_torch_dtype == torch.float32, "the cache is not in float32")
    multiple, most = DECODER_HEAD_MULTIPLE, DECODER_MAX_HEAD
    size = attention.head_size
    _need(size % multiple == 0 and size <= most, f"heads of {size} are no multiple of {multiple} up to {most}")


def _need_rotary(rotary: Any) -> None:
    """Raises Unfit if `rotary` rotates in another way. It may have its own table of angles."""
    plain = isinstance(rotary, RotaryEmbedding) and type(rotary).forward_static is RotaryEmbedding.forward_static
    plain = plain and type(rotary).forward_native is RotaryEmbedding.forward_native
    _need(
        plain and rotary.is_neox_style and rotary.rotary_dim == rotary.head_size, "positions are rotated in another way"
    )


def _is_plain(norm: Any) -> bool:
    plain = type(norm) is CpuRMSNorm and norm.variance_size_override is None
    return plain and norm.weight.dtype == torch.float32


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unfit(otherwise)
