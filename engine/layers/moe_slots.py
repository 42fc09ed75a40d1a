"""The assignment of tokens to experts, as `torch.ops.voltserve.nvfp4_moe_linear` takes it.

The contract of that op is kernels/contracts/nvfp4.h. A step of M tokens with k experts per token has M k slots. Slot s
is the pair of token s // k and one of its experts.
"""

from typing import NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

from engine.limits import EXPERT_BLOCKS


class Slots(NamedTuple):
    """The (token, expert) pairs of a step, in blocks. The fields are operands of `nvfp4_moe_linear`."""

    slots: torch.Tensor
    experts: torch.Tensor
    padded_slots: torch.Tensor


def block_size(slots: int, experts: int) -> int:
    """Slots per block: as many as an expert gets on average, since padding to a block is wasted work.

    kernels/cuda/linear/plan.cpp makes the same choice.
    """
    return next((block for block in EXPERT_BLOCKS if slots <= block * experts), EXPERT_BLOCKS[-1])


def align(topk_ids: torch.Tensor, experts: int, block: int) -> Slots:
    """Sorts slots 0 … M k - 1 of topk_ids [M, k] by expert. Each expert's slots are padded to whole blocks with M k."""
    if topk_ids.is_cuda and hasattr(torch.ops._moe_C, "moe_align_block_size"):
        return Slots(*moe_align_block_size(topk_ids, block, experts, pad_sorted_ids=True))
    return align_in_torch(topk_ids, experts, block)


def align_in_torch(topk_ids: torch.Tensor, experts: int, block: int) -> Slots:
    """`align` without vLLM's compiled op. No shape depends on a value, so a CUDA graph can capture it."""
    ids = topk_ids.flatten().long()
    blocks = min(ids.numel(), ids.numel() // block + experts)  # the upper bound
    counts = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    ends = ((counts + block - 1) // block).cumsum(0)  # in blocks
    order = ids.argsort(stable=True)
    of_order = ids[order]
    # Per expert: the position of its first slot in the result, minus that in `order`.
    shift = (ends - (counts + block - 1) // block) * block - (counts.cumsum(0) - counts)
    slots = torch.full((blocks * block,), ids.numel(), dtype=torch.int32, device=ids.device)
    slots[torch.arange(ids.numel(), device=ids.device) + shift[of_order]] = order.int()
    of_block = torch.searchsorted(ends, torch.arange(blocks, device=ids.device), right=True).clamp(max=experts - 1)
    return Slots(slots, of_block.int(), ends[-1:].int() * block)
