"""The operators that vLLM's Python calls and its own compiled code would define: where each comes from here.

vLLM is installed without compiled code. Its modules still name operators of `torch.ops._C` and others, some of them at
import. `TABLE` lists each one on our path, with its schema as vLLM calls it and what computes it. `install` defines
them before vLLM is imported, and puts empty modules in the place of vLLM's libraries.

An operator that is only named (`NAMED`) has a schema and no code, since passes that never run here mention it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

# vLLM's libraries, which its modules import for their side effects.
LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")

# vLLM imports its functions wherever there is a GPU. They are for compute capability 8.0 and newer.
FLASH_ATTENTION = "vllm.vllm_flash_attn"


@dataclass(frozen=True)
class Operator:
    """One operator: `namespace::schema`, and the function that computes it on any device."""

    namespace: str
    schema: str
    compute: Callable[..., Any]

    @property
    def name(self) -> str:
        """The operator's name without its namespace."""
        return self.schema.partition("(")[0]


def _nothing(*_: Any) -> None:
    """For what has no meaning here: memory policies of NUMA nodes."""


def _slots(
    query_start: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    """slots[t] = block_table[r][p // B] * B + p % B for the token t of request r at position p = positions[t].

    query_start int32 [R + 1]; positions int64 [T]; block_table int32 [at least R, any]; slots int64, written up to T.
    """
    counts = query_start.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = positions[: len(requests)]
    blocks = block_table[requests, at // block_size].long()
    slots[: len(requests)] = blocks * block_size + at % block_size


def _half(*tensors: torch.Tensor | None) -> bool:
    """Whether our kernels for GPUs take these."""
    return all(tensor is None or (tensor.is_cuda and tensor.dtype == torch.float16) for tensor in tensors)


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    if weight is not None and _half(out, x, weight) and x.dim() in (2, 3) and x.shape[-1] % 8 == 0:
        torch.ops.voltserve.rms_norm_to(out, x, weight, eps)
        return
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    out.copy_(y if weight is None else y.to(weight.dtype) * weight)


def _fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """residual += x; x = the norm of the sum."""
    if weight is not None and _half(x, residual, weight) and x.shape[-1] % 8 == 0:
        torch.ops.voltserve.add_rms_norm(x, residual, weight, eps)
        return
    residual.add_(x)
    _rms_norm(x, residual, weight, eps)


def _repetition_penalties(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Divides positive and multiplies negative logits [M, V] of tokens that were there by penalties [M]."""
    factor = torch.where(prompt_mask | output_mask, penalties.unsqueeze(1), 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / factor, factor))


def _weak_ref(tensor: torch.Tensor) -> torch.Tensor:
    """An alias. vLLM's does not keep the memory alive; keeping it costs a captured graph its output's few kilobytes."""
    return tensor.view(tensor.shape)


def _topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> None:
    """weights, ids [M, k]: the k largest of softmax(logits [M, E]). A `bias` [E] only chooses."""
    _topk(weights, ids, positions, logits.float().softmax(-1), renormalize, bias)


def _topk_sigmoid(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> None:
    """The same of sigmoid(logits)."""
    _topk(weights, ids, positions, logits.float().sigmoid(), renormalize, bias)


def _topk(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> None:
    chosen = (scores if bias is None else scores + bias).topk(ids.shape[1]).indices
    picked = scores.gather(1, chosen)
    weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    ids.copy_(chosen)
    rows = torch.arange(ids.shape[0], dtype=positions.dtype, device=ids.device).unsqueeze(1)
    positions.copy_(rows + ids.shape[0] * torch.arange(ids.shape[1], dtype=positions.dtype, device=ids.device))


def _align(
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


def _moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, H] = the sum of x [M, k, H] over k."""
    torch.sum(x, 1, out=out)


def _never(_capability: int) -> bool:
    """No kernel of CUTLASS is here."""
    return False


def _rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin: torch.Tensor,
    halves: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates query [T, H D] and key [T, H_kv D] in place.

    cos_sin [positions, R] holds R / 2 cosines, then as many sines. Angle i rotates dimensions i and i + R / 2 of a head
    (`halves`), or 2 i and 2 i + 1, counted from `rope_dim_offset` on.
    """
    if _half(query, key, cos_sin) and not rope_dim_offset and not inverse:
        torch.ops.voltserve.rotary_embedding(positions.flatten(), query, key, head_size, cos_sin, halves)
        return
    cos, sin = cos_sin[positions.flatten()].chunk(2, dim=-1)
    if inverse:
        sin = -sin
    cos, sin = cos[:, None], sin[:, None]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., rope_dim_offset : rope_dim_offset + cos_sin.shape[1]]
        first, second = rotated.chunk(2, dim=-1) if halves else (rotated[..., ::2], rotated[..., 1::2])
        a, b = first.clone(), second.clone()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def _gated(activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """out [..., I] = activate(x's first half) * x's second half, x [..., 2 I]."""

    def compute(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(activate(gate), up, out=out)

    return compute


def _clamped_silu(out: torch.Tensor, x: torch.Tensor, limit: float, alpha: float, beta: float) -> None:
    """out = g sigmoid(alpha g) (u + beta), g and u being x's halves, g at most `limit`, u between -limit and limit."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.mul(gate * torch.sigmoid(alpha * gate), up + beta, out=out)


def _swiglu_oai(out: torch.Tensor, x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """gpt-oss's gated activation: gate and up alternate in x."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    torch.mul(gate * torch.sigmoid(alpha * gate), up + 1, out=out)


_TOPK = (
    "(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) positions, Tensor logits, bool renormalize, Tensor? bias) -> ()"
)

TABLE = (
    Operator("_C", "rms_norm(Tensor(a!) result, Tensor input, Tensor? weight, float epsilon) -> ()", _rms_norm),
    Operator(
        "_C",
        "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
        _fused_add_rms_norm,
    ),
    Operator(
        "_C",
        "apply_repetition_penalties_(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, "
        "Tensor penalties) -> ()",
        _repetition_penalties,
    ),
    Operator("_C", "weak_ref_tensor(Tensor(a) tensor) -> Tensor(a)", _weak_ref),
    Operator("_moe_C", f"topk_softmax{_TOPK}", _topk_softmax),
    Operator("_moe_C", f"topk_sigmoid{_TOPK}", _topk_sigmoid),
    Operator(
        "_moe_C",
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids, "
        "Tensor(b!) experts_ids, Tensor(c!) num_tokens_post_pad, Tensor? maybe_expert_map) -> ()",
        _align,
    ),
    Operator("_moe_C", "moe_sum(Tensor input, Tensor(a!) output) -> ()", _moe_sum),
    *(
        Operator("_C", f"{name}(int capability) -> bool", _never)
        for name in (
            "cutlass_scaled_mm_supports_fp4",
            "cutlass_scaled_mm_supports_fp8",
            "cutlass_scaled_mm_supports_block_fp8",
            "cutlass_group_gemm_supported",
        )
    ),
    Operator("_C", "init_cpu_memory_env(SymInt[] nodes) -> ()", _nothing),
    Operator(
        "_C",
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, SymInt block_size) -> ()",
        _slots,
    ),
    Operator(
        "_C",
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        _rotate,
    ),
    Operator("_C", "silu_and_mul(Tensor(a!) result, Tensor input) -> ()", _gated(functional.silu)),
    Operator("_C", "gelu_and_mul(Tensor(a!) out, Tensor input) -> ()", _gated(functional.gelu)),
    Operator(
        "_C",
        "gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()",
        _gated(partial(functional.gelu, approximate="tanh")),
    ),
    Operator(
        "_C",
        "silu_and_mul_with_clamp(Tensor(a!) result, Tensor input, float limit, float alpha, float beta) -> ()",
        _clamped_silu,
    ),
    Operator(
        "_C",
        "swigluoai_and_mul(Tensor(a!) out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
        _swiglu_oai,
    ),
)

# Named by modules that are imported and never run: passes of vLLM's compiler, and kernels of newer GPUs.
NAMED = (
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
)


class _Missing(types.ModuleType):
    """A module whose functions say that they are not here when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: Any, **_options: Any) -> None:
            raise ImportError(f"{self.__name__}.{name}: vLLM's FlashAttention is not part of voltserve")

        return missing


class _StandIn(importlib.abc.Loader):
    """Loads a module without content of its own."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return _Missing(spec.name) if spec.name == FLASH_ATTENTION else None

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _InPlaceOfLibraries(importlib.abc.MetaPathFinder):
    """Finds stand-ins under the names of vLLM's libraries. FlashAttention's Python stays below its name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in LIBRARIES:
            return importlib.machinery.ModuleSpec(name, _StandIn())
        if name == FLASH_ATTENTION:
            spec = importlib.machinery.ModuleSpec(name, _StandIn(), is_package=True)
            spec.submodule_search_locations = [f"{folder}/vllm_flash_attn" for folder in path or ()]
            return spec
        return None


@cache
def install() -> None:
    """Defines the operators and the empty modules. A second call does nothing."""
    sys.meta_path.insert(0, _InPlaceOfLibraries())
    for operator in TABLE:
        library = _library(operator.namespace)
        library.define(operator.schema)
        library.impl(operator.name, operator.compute, "CompositeExplicitAutograd")
    for name in NAMED:
        _library("_C").define(f"{name}(Tensor(a!) out) -> ()")


@cache
def _library(namespace: str) -> torch.library.Library:
    """Kept for the life of the process: operators vanish with their library."""
    return torch.library.Library(namespace, "FRAGMENT")
