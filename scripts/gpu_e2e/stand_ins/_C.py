"""Stands in for vLLM's compiled operators (`vllm._C`) on a machine whose torch they do not load into.

The release's shared objects are built for torch 2.10; the GPU at hand has a later one. What a decoder with rotary
embeddings, RMS norms and SwiGLU calls is in vllm_ops.cu, compiled, since an eager step pays each operator's way on the
host; what is called less often is written here; both with vLLM's operator names and signatures, so that the rest of
vLLM runs unchanged. What vLLM's modules only name when they are imported gets a schema and no implementation.

Copied to `vllm/_C.py` by scripts/gpu_e2e/pack.py. Never part of what is installed on a V100.
"""

from pathlib import Path

import torch

_C = torch.library.Library("_C", "DEF")
_CACHE = torch.library.Library("_C_cache_ops", "DEF")
_MOE = torch.library.Library("_moe_C", "DEF")
torch.library.Library("_C_cuda_utils", "DEF")


def apply_repetition_penalties(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Divides positive and multiplies negative logits [M, V] of tokens that were there by penalties [M]."""
    factor = torch.where(prompt_mask | output_mask, penalties.unsqueeze(1), 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / factor, factor))


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> None:
    """weights, ids [M, k]: the k largest of softmax(logits [M, E]), after which `bias` [E] would choose, not weigh."""
    scores = logits.float().softmax(-1)
    chosen = (scores if bias is None else scores + bias).topk(ids.shape[1]).indices
    picked = scores.gather(1, chosen)
    weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    ids.copy_(chosen)
    rows = torch.arange(ids.shape[0], dtype=positions.dtype, device=ids.device).unsqueeze(1)
    positions.copy_(rows + ids.shape[0] * torch.arange(ids.shape[1], dtype=positions.dtype, device=ids.device))


def moe_align_block_size(
    topk_ids: torch.Tensor,
    experts: int,
    block: int,
    slots: torch.Tensor,
    of_block: torch.Tensor,
    padded_slots: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Slots sorted by expert, padded to whole blocks with their number; the expert of each block."""
    from engine.layers.moe_slots import align_in_torch

    aligned = align_in_torch(topk_ids, experts, block)
    slots.fill_(topk_ids.numel())[: len(aligned.slots)] = aligned.slots[: len(slots)]
    of_block.zero_()[: len(aligned.experts)] = aligned.experts[: len(of_block)]
    padded_slots.copy_(aligned.padded_slots)


def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, H] = the sum of x [M, k, H] over k."""
    torch.sum(x, 1, out=out)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """An alias. vLLM's does not keep the memory alive; keeping it costs a captured graph its output's few kilobytes."""
    return tensor.view(tensor.shape)


for schema in (
    "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()",
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()",
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()",
):
    _C.define(schema)
torch.ops.load_library(str(Path(__file__).with_name("vllm_ops.so")))

for library, schema, implementation in (
    (
        _C,
        "apply_repetition_penalties_(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, Tensor penalties) -> "
        "()",
        apply_repetition_penalties,
    ),
    (
        _MOE,
        "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) positions, Tensor logits, bool renormalize, "
        "Tensor? bias) -> ()",
        topk_softmax,
    ),
    (
        _MOE,
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids, "
        "Tensor(b!) experts_ids, Tensor(c!) num_tokens_post_pad, Tensor? maybe_expert_map) -> ()",
        moe_align_block_size,
    ),
    (_MOE, "moe_sum(Tensor input, Tensor(a!) output) -> ()", moe_sum),
    (_C, "weak_ref_tensor(Tensor(a) tensor) -> Tensor(a)", weak_ref_tensor),
):
    library.define(schema)
    library.impl(schema.partition("(")[0], implementation, "CUDA")

for schema in (
    "cutlass_scaled_mm_supports_fp4(int capability) -> bool",
    "cutlass_scaled_mm_supports_fp8(int capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool",
    "cutlass_group_gemm_supported(int capability) -> bool",
):
    _C.define(schema)
    _C.impl(schema.partition("(")[0], lambda capability: False, "CompositeExplicitAutograd")

# Named when vllm.compilation.passes is imported; called by nothing that runs here.
for name in (
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "per_token_group_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
    "fused_qk_norm_rope",
):
    _C.define(f"{name}(Tensor(a!) out) -> ()")
