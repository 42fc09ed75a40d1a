"""The assignment of tokens to experts, as `torch.ops.voltserve.nvfp4_moe_linear` takes it.

The contract of that op is kernels/contracts/nvfp4.h. A step of M tokens with k experts per token has M k slots. Slot s
is the pair of token s // k and one of its experts.
"""

from typing import NamedTuple

import torch

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


def align(
    topk_ids: torch.Tensor,
    experts: int,
    block: int,
    *,
    expert_map: torch.Tensor | None = None,
    some_nowhere: bool = False,
) -> Slots:
    """Sorts slots 0 … M k - 1 of topk_ids [M, k] by expert. Each expert's slots are padded to whole blocks with M k.

    `some_nowhere`: slots whose expert is negative are left out. So are those of experts that `expert_map` [experts]
    gives no number on this rank. No shape depends on a value, so a CUDA graph can capture it.
    """
    ids = topk_ids.flatten().long()
    if some_nowhere:  # these have an expert of their own, the last one, to which no block belongs
        mapped = ids if expert_map is None else expert_map[ids.clamp(0, experts - 1)].long()
        ids = torch.where((ids < 0) | (ids >= experts) | (mapped < 0), experts, mapped)
    blocks = min(ids.numel(), ids.numel() // block + experts)  # the upper bound
    counts = torch.zeros(experts + some_nowhere, dtype=torch.long, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    needed = (counts + block - 1) // block
    if some_nowhere:
        needed[experts:] = 0
    ends = needed.cumsum(0)
    order = ids.argsort(stable=True)
    of_order = ids[order]
    # Per expert: the position of its first slot in the result, minus that in `order`.
    shift = (ends - needed) * block - (counts.cumsum(0) - counts)
    places = torch.arange(ids.numel(), device=ids.device) + shift[of_order]
    if some_nowhere:
        places = places.masked_fill(of_order == experts, blocks * block)
    slots = torch.full((blocks * block + some_nowhere,), ids.numel(), dtype=torch.int32, device=ids.device)
    slots[places] = order.int()
    of_block = torch.searchsorted(ends[:experts], torch.arange(blocks, device=ids.device), right=True)
    return Slots(
        slots[: blocks * block], of_block.clamp(max=experts - 1).int(), ends[experts - 1 : experts].int() * block
    )
