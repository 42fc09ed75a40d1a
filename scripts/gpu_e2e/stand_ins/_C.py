"""Stands in for vLLM's compiled operators (`vllm._C`) on a machine whose torch they do not load into.

The release's shared objects are built for torch 2.10; the GPU at hand has a later one. What a decoder with rotary
embeddings, RMS norms and SwiGLU calls is written here in Triton with vLLM's operator names and signatures, so that the
rest of vLLM runs unchanged. What vLLM's modules only name when they are imported gets a schema and no implementation.

Copied to `vllm/_C.py` by scripts/gpu_e2e/pack.py. Never part of what is installed on a V100.
"""

import torch
import triton
import triton.language as tl

_C = torch.library.Library("_C", "DEF")
_CACHE = torch.library.Library("_C_cache_ops", "DEF")
_MOE = torch.library.Library("_moe_C", "DEF")
torch.library.Library("_C_cuda_utils", "DEF")


@triton.jit
def _rms_norm_kernel(
    out, x, residual, weight, eps, x_row, x_head, heads, width, FUSED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    start = (row // heads) * x_row + (row % heads) * x_head
    value = tl.load(x + start + column, inside, 0.0).to(tl.float32)
    if FUSED:
        value += tl.load(residual + row * width + column, inside, 0.0).to(tl.float32)
        tl.store(residual + row * width + column, value, inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    weights = tl.load(weight + column, inside, 0.0).to(tl.float32)
    target = out + (start if FUSED else row * width)
    tl.store(target + column, value * scale * weights, inside)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension; x may be a view of heads in a wider row."""
    width = x.shape[-1]
    if x.dim() < 3:
        x = x.reshape(-1, 1, width)
    heads = x.shape[-2]
    x = x.reshape(-1, heads, width)
    rows = x.shape[0] * heads
    _rms_norm_kernel[(rows,)](
        out,
        x,
        x,
        weight,
        eps,
        x.stride(0),
        x.stride(1),
        heads,
        width,
        False,
        triton.next_power_of_2(width),
        num_warps=8,
    )


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x; x = norm(residual) * weight. Both are contiguous [M, width]."""
    width = x.shape[-1]
    rows = x.numel() // width
    _rms_norm_kernel[(rows,)](
        x, x, residual, weight, eps, width, 0, 1, width, True, triton.next_power_of_2(width), num_warps=8
    )


@triton.jit
def _silu_and_mul_kernel(out, x, width, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_row + column, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + column, gate / (1 + tl.exp(-gate)) * up, inside)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """out [..., d] = silu(x[..., :d]) * x[..., d:]."""
    width = out.shape[-1]
    rows = out.numel() // width
    _silu_and_mul_kernel[(rows, triton.cdiv(width, 1024))](out, x, width, 2 * width, 1024)


@triton.jit
def _rotary_kernel(positions, x, cos_sin, x_row, x_head, rotated, HALF: tl.constexpr, NEOX: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, HALF)
    inside = index < rotated // 2
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * rotated + index, inside, 0.0).to(tl.float32)
    sin = tl.load(cos_sin + position * rotated + rotated // 2 + index, inside, 0.0).to(tl.float32)
    start = x + token.to(tl.int64) * x_row + head * x_head
    if NEOX:
        first, second = start + index, start + rotated // 2 + index
    else:
        first, second = start + 2 * index, start + 2 * index + 1
    a = tl.load(first, inside, 0.0).to(tl.float32)
    b = tl.load(second, inside, 0.0).to(tl.float32)
    tl.store(first, a * cos - b * sin, inside)
    tl.store(second, b * cos + a * sin, inside)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates the first cos_sin_cache.shape[-1] elements of each head in place; positions [M]."""
    rotated = cos_sin_cache.shape[-1]
    half = triton.next_power_of_2(rotated // 2)
    for x in (query, key):
        if x is None:
            continue
        heads = x.reshape(positions.numel(), -1, head_size) if x.dim() == 3 else x.unflatten(-1, (-1, head_size))
        _rotary_kernel[(heads.shape[0], heads.shape[1])](
            positions, heads, cos_sin_cache, heads.stride(0), heads.stride(1), rotated, half, is_neox, num_warps=1
        )


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
    from engine.moe_slots import align_in_torch

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


for library, schema, implementation in (
    (_C, "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", rms_norm),
    (
        _C,
        "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
        fused_add_rms_norm,
    ),
    (_C, "silu_and_mul(Tensor(a!) out, Tensor x) -> ()", silu_and_mul),
    (
        _C,
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()",
        rotary_embedding,
    ),
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
