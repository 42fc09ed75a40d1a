"""Speculative decoding on CPUs: which drafts are kept, and the inputs of the model that drafts.

R requests; request r's D_r drafts lie together in tensors over all drafts, up to ends[r]. V tokens in the vocabulary.
vLLM's Triton kernels do the same on GPUs. Requests are few, so they are walked one after another.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

NO_TOKEN = -1


def _spans(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(request, its first draft, the one after its last) of each request."""
    begin = 0
    for request, end in enumerate(ends.tolist()):
        yield request, begin, end
        begin = end


def keep_greedy(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    best: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    _most: int,
) -> None:
    """out [R, most drafts + 1]: the target's best tokens up to the first that is not the draft; with all kept, `bonus`.

    best [all drafts]; bonus [R, 1]. Requests that are not greedy are left alone.
    """
    for request, begin, end in _spans(ends):
        if is_greedy is not None and not is_greedy[request]:
            continue
        wrong = (drafts[begin:end] != best[begin:end]).nonzero()
        kept = int(wrong[0]) + 1 if len(wrong) else end - begin
        out[request, :kept] = best[begin : begin + kept]
        if not len(wrong):
            out[request, end - begin] = bonus.flatten()[request]


def keep_at_random(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform: torch.Tensor,
    is_greedy: torch.Tensor | None,
    _most: int,
    _vocabulary: int,
    no_draft_probs: bool,
) -> None:
    """Keeps a draft with probability target / draft. The first that is not kept is replaced by its `recovered` token.

    target_probs, draft_probs [all drafts, V]; drafts without probabilities count as certain. Greedy requests are left.
    """
    places = torch.arange(len(drafts))
    target = target_probs[places, drafts]
    sure = no_draft_probs or draft_probs is None
    draft = torch.ones_like(target) if sure or draft_probs is None else draft_probs[places, drafts]
    kept_each = (draft > 0) & (target >= uniform[: len(drafts)] * draft)
    for request, begin, end in _spans(ends):
        if is_greedy is not None and is_greedy[request]:
            continue
        wrong = (~kept_each[begin:end]).nonzero()
        kept = int(wrong[0]) if len(wrong) else end - begin
        out[request, :kept] = drafts[begin : begin + kept]
        out[request, kept] = recovered[begin + kept] if len(wrong) else bonus.flatten()[request]


def recover(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    weights: torch.Tensor,
    _vocabulary: int,
    no_draft_probs: bool,
) -> None:
    """out [all drafts]: a token from what the target's distribution has over the draft's.

    It is the argmax of that excess times `weights` [R, V], which are reciprocals of exponentially distributed numbers.
    """
    if no_draft_probs or draft_probs is None:
        excess = target_probs.clone()
        excess[torch.arange(len(drafts)), drafts] = 0
    else:
        excess = (target_probs - draft_probs).clamp(min=0)
    for request, begin, end in _spans(ends):
        out[begin:end] = (excess[begin:end] * weights[request]).argmax(-1)


def expand(out: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replaced: int, by: int) -> None:
    """out [all drafts]: each request's value for each of its drafts. `by` replaces `replaced`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    expanded = values.repeat_interleave(counts)
    out[: len(expanded)] = expanded.masked_fill(expanded == replaced, by)


def after_rejection(
    ends: torch.Tensor,
    valid: torch.Tensor,
    query_start: torch.Tensor,
    to_sample: torch.Tensor,
    rejected: torch.Tensor,
    requests: int,
) -> None:
    """rejected [R]: drafts that were not kept. to_sample [R]: where each request's last kept token lies in the step."""
    drafted = ends[:requests].diff(prepend=ends.new_zeros(1))
    lost = torch.where(drafted > 0, drafted + 1 - valid[:requests], 0)
    rejected[:requests] = lost
    to_sample[:requests] = (query_start[1 : requests + 1] - 1 - lost).to(to_sample.dtype)


def next_tokens(
    sampled: torch.Tensor,
    discard: torch.Tensor,
    backup: torch.Tensor,
    following: torch.Tensor,
    valid: torch.Tensor,
    vocabulary: int,
    most: int,
    requests: int,
) -> None:
    """following [R]: the last token that was sampled, or `backup`. valid [R]: how many were.

    sampled [R, any] has NO_TOKEN for none. Requests to `discard` have sampled nothing.
    """
    tokens = sampled[:requests, :most]
    real = (tokens != NO_TOKEN) & (tokens < vocabulary) & ~discard[:requests, None]
    places = torch.arange(1, tokens.shape[1] + 1)
    last = (real * places).max(1).values
    picked = tokens.gather(1, (last - 1).clamp(min=0)[:, None])[:, 0]
    following[:requests] = torch.where(last > 0, picked, backup[:requests])
    valid[:requests] = real.sum(1)


def _slots(block_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the cache keeps `positions` of requests `rows`; beyond the table, its last block."""
    number = (positions // block_size).clamp(max=block_table.shape[1] - 1)
    return block_table[rows, number].long() * block_size + positions % block_size


def next_step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    next_positions: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    longest: int,
    nowhere: int,
) -> None:
    """One token further: positions, slots and lengths. A request at the model's `longest` length writes `nowhere`."""
    requests = len(positions)
    further = positions + 1
    beyond = further >= longest
    further = further.masked_fill(beyond, 0)
    next_positions[:requests] = further
    slots[requests:] = nowhere
    slots[:requests] = _slots(block_table, torch.arange(requests), further, block_size).masked_fill(beyond, nowhere)
    lengths[:requests] = torch.where(beyond, 1, (lengths[:requests] + 1).clamp(max=longest)).to(lengths.dtype)


def draft_inputs(
    targets: torch.Tensor,
    target_positions: torch.Tensor,
    following: torch.Tensor,
    out_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_rejected: torch.Tensor,
    out_masked: torch.Tensor,
    out_new: torch.Tensor,
    out_hidden: torch.Tensor,
    query_start: torch.Tensor,
    query_end: torch.Tensor,
    padding: int,
    mask_token: int,
    total: int,
    extra: int,
    shift: bool,
) -> None:
    """The drafting model's tokens: a request's kept ones, its next one, `extra` - 1 masks to draft at, then padding.

    `shift`: the drafting model reads the token after the one that its hidden state belongs to. So the first is left
    out. out_new [R extra]: where the next token and the masks lie. out_hidden: where each of the target's tokens went.
    """
    starts, ends = query_start.tolist(), query_end.tolist()
    for request, end in enumerate(ends):
        begin, after = starts[request], starts[request + 1]
        kept = end - begin + (0 if shift else 1)
        at = begin + request * (extra - (1 if shift else 0))
        count = kept + extra + (after - end - 1)
        steps = torch.arange(count)
        read = (begin + (1 if shift else 0) + steps).clamp(max=total - 1)
        is_next, is_mask = steps == kept, (steps > kept) & (steps < kept + extra)
        lost = steps >= kept + extra
        ids = torch.where(steps < kept, targets[read], padding)
        ids = torch.where(is_next, following[request], ids).masked_fill(is_mask, mask_token)
        here = slice(at, at + count)
        out_ids[here] = ids
        out_positions[here] = (target_positions[begin] + steps).masked_fill(lost, 0)
        out_rejected[here], out_masked[here] = lost, is_mask
        out_new[request * extra : (request + 1) * extra] = at + kept + torch.arange(extra, dtype=out_new.dtype)
        if shift:
            out_hidden[begin:after] = at + torch.arange(after - begin, dtype=out_hidden.dtype)


def dflash_inputs(
    following: torch.Tensor,
    target_positions: torch.Tensor,
    out_ids: torch.Tensor,
    context_positions: torch.Tensor,
    query_positions: torch.Tensor,
    context_slots: torch.Tensor,
    query_slots: torch.Tensor,
    out_new: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    rejected: torch.Tensor | None,
    mask_token: int,
    block_size: int,
    queries: int,
    drafts: int,
    total: int,
    _has_rejected: bool,
) -> None:
    """DFlash's step: the target's tokens as context, then per request its next token and `queries` - 1 masks.

    out_new [R drafts]: where the masks lie. The last kept token is the last of the context without rejected ones.
    """
    starts = query_start.tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        lost = 0 if rejected is None else int(rejected[request])
        last = target_positions[max(end - lost, begin + 1) - 1]
        row = torch.tensor(request)
        context = target_positions[torch.arange(begin, end).clamp(max=total - 1)]
        context_positions[begin:end] = context
        context_slots[begin:end] = _slots(block_table, row, context, block_size)
        here = slice(request * queries, (request + 1) * queries)
        query = last + 1 + torch.arange(queries)
        query_positions[here] = query
        query_slots[here] = _slots(block_table, row, query, block_size)
        out_ids[here] = mask_token
        out_ids[here.start] = following[request]
        new = here.start + 1 + torch.arange(queries - 1, dtype=out_new.dtype)
        out_new[request * drafts : request * drafts + queries - 1] = new
