"""Which experts a token goes to, and the sum of their results. M tokens, E experts, k of them per token.

Nothing here waits for the GPU, and no shape depends on a value: a CUDA graph can capture it.
"""

import torch

from engine.layers.moe_slots import align

NOWHERE = -1  # as an expert: of padding, of another rank, or of an unused block
# What vLLM's kernel adds to a sum before it divides by it.
SMALLEST_SUM = 1e-20


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """weights, ids [M, k]: the k largest of softmax(logits [M, E]).

    A `bias` [E] only chooses. Rows where `is_padding` [M] is set go nowhere.
    """
    _choose(weights, ids, positions, logits.float().softmax(-1), renormalize, bias, 1.0, is_padding)


def topk_sigmoid(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
) -> None:
    """The same of sigmoid(logits). All weights are multiplied by `factor`."""
    _choose(weights, ids, positions, logits.float().sigmoid(), renormalize, bias, factor, is_padding)


def topk_softplus_sqrt(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    factor: float,
    bias: torch.Tensor | None,
    tokens: torch.Tensor | None = None,
    experts_of_token: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """The same of sqrt(softplus(logits)). With tables, token t [M] goes to experts_of_token[t], [vocabulary, k]."""
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    chosen = None if tokens is None or experts_of_token is None else experts_of_token[tokens.long()].long()
    _choose(weights, ids, positions, scores, renormalize, bias, factor, is_padding, chosen)


def _choose(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    factor: float,
    is_padding: torch.Tensor | None,
    chosen: torch.Tensor | None = None,
) -> None:
    tokens, count = ids.shape
    if chosen is None:
        chosen = (scores if bias is None else scores + bias).topk(count).indices
    picked = scores.gather(1, chosen)
    if renormalize:
        picked = picked / picked.sum(-1, keepdim=True)
    weights.copy_(picked if factor == 1.0 else picked * factor)
    ids.copy_(chosen if is_padding is None else chosen.masked_fill(is_padding[:, None], NOWHERE))
    steps = torch.arange(tokens * count, dtype=positions.dtype, device=ids.device)
    positions.copy_(steps.view(count, tokens).T)


def grouped_topk(
    scores: torch.Tensor,
    groups: int,
    chosen_groups: int,
    count: int,
    renormalize: bool,
    factor: float,
    bias: torch.Tensor,
    scoring: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts of the best groups: weights float32 [M, k] and numbers int32 [M, k].

    scores [M, E], or logits if `scoring` is 1 (sigmoid). A group's score is the sum of its two largest scores with
    their `bias` [E]. The bias only chooses.
    """
    plain = scores.float().sigmoid() if scoring == 1 else scores.float()
    biased = plain + bias.float()
    grouped = biased.view(len(scores), groups, -1)
    best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1).topk(chosen_groups).indices
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    ids = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(count).indices
    weights = plain.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights * factor, ids.int()


def align_block_size(
    topk_ids: torch.Tensor,
    experts: int,
    block: int,
    slots: torch.Tensor,
    of_block: torch.Tensor,
    padded_slots: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Slots sorted by expert, padded to whole blocks with their number; the expert of each block.

    `expert_map` [E] has this rank's number of each expert, or NOWHERE. Slots of experts that go nowhere are left out.
    """
    aligned = align(topk_ids, experts, block, expert_map=expert_map, some_nowhere=True)
    slots.fill_(topk_ids.numel())[: len(aligned.slots)] = aligned.slots[: len(slots)]
    of_block.fill_(NOWHERE)[: len(aligned.experts)] = aligned.experts[: len(of_block)]
    blocks = torch.arange(len(of_block), device=of_block.device)
    of_block.masked_fill_(blocks * block >= aligned.padded_slots, NOWHERE)
    padded_slots.copy_(aligned.padded_slots)


def moe_sum(
    x: torch.Tensor, out: torch.Tensor, topk_ids: torch.Tensor | None = None, expert_map: torch.Tensor | None = None
) -> None:
    """out [M, H] = the sum of x [M, k, H] over k. With topk_ids [M, k], without the experts that go nowhere."""
    if topk_ids is not None:
        local = topk_ids if expert_map is None else expert_map[topk_ids.long().clamp(min=0)]
        x = x.masked_fill(((topk_ids < 0) | (local < 0))[..., None], 0)
    torch.sum(x, 1, out=out)
