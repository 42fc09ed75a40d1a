"""Norms, rotation, caches and what else a step's modules call, on any device. Ours on GPUs are kernels/cuda/plain."""

from typing import Any

import torch


def nothing(*_: Any) -> None:
    """For what has no meaning here: memory policies of NUMA nodes."""


def never(_capability: int) -> bool:
    """No kernel of CUTLASS is here."""
    return False


def shared_memory(device: int) -> int:
    """The most shared memory of a block on GPU `device`, in bytes."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device < 0 else device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in torch's stubs


def _half(*tensors: torch.Tensor | None) -> bool:
    """Whether our kernels for GPUs take these."""
    return all(tensor is None or (tensor.is_cuda and tensor.dtype == torch.float16) for tensor in tensors)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    if weight is not None and _half(out, x, weight) and x.dim() in (2, 3) and x.shape[-1] % 8 == 0:
        torch.ops.voltserve.rms_norm_to(out, x, weight, eps)
        return
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    out.copy_(y if weight is None else y.to(weight.dtype) * weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """residual += x; x = the norm of the sum."""
    if weight is not None and _half(x, residual, weight) and x.shape[-1] % 8 == 0:
        torch.ops.voltserve.add_rms_norm(x, residual, weight, eps)
        return
    residual.add_(x)
    rms_norm(x, residual, weight, eps)


def rotate(
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


def repetition_penalties(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Divides positive and multiplies negative logits [M, V] of tokens that were there by penalties [M]."""
    factor = torch.where(prompt_mask | output_mask, penalties.unsqueeze(1), 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / factor, factor))


def weak_ref(tensor: torch.Tensor) -> torch.Tensor:
    """An alias. vLLM's does not keep the memory alive; keeping it costs a captured graph its output's few kilobytes."""
    return tensor.view(tensor.shape)


def slots_of(
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


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    cache_dtype: str,
    _key_scale: torch.Tensor,
    _value_scale: torch.Tensor,
) -> None:
    """Writes key and value [T, H_kv, D] to their slots of caches [blocks, block size, H_kv, D].

    A negative slot is written nowhere.
    """
    if cache_dtype != "auto":
        raise NotImplementedError(f"reshape_and_cache_flash: expected a cache in the model's dtype, got {cache_dtype}")
    written = slots >= 0
    blocks, offsets = slots[written] // key_cache.shape[1], slots[written] % key_cache.shape[1]
    for new, cached in ((key, key_cache), (value, value_cache)):
        cached[blocks, offsets] = new[: len(slots)][written].to(cached.dtype)


class _Pinned:
    """Page-locked memory as torch takes it from other libraries, by its address."""

    def __init__(self, tensor: torch.Tensor, typestr: str) -> None:
        self.tensor = tensor  # kept: the view is of its memory
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def cuda_view(tensor: torch.Tensor) -> torch.Tensor:
    """The page-locked `tensor` as a tensor on the current GPU, which reads it over PCIe where it lies."""
    if not tensor.is_pinned():
        raise ValueError("get_cuda_view_from_cpu_tensor: expected page-locked memory (pin_memory), got another")
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    typestr = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[tensor.element_size()]
    return torch.as_tensor(_Pinned(tensor.view(integer), typestr), device="cuda").view(tensor.dtype)
