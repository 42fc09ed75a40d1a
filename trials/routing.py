"""What routers chose while texts were written, and whether texts part because of routers' near ties.

A router takes the k experts of largest logits. The last expert taken and the first left out may be closer than rounding
moves them. Two engines then take different experts, and compute different things from there on.
"""

from typing import Any

import torch

from trials.compare import GAP, first_difference

# The allowed difference of two of a router's logits, in units of their deviation. Some 40 roundings of float16, each of
# 2^-11 / sqrt(3), lie between a token and the last layer's router. Two engines and two logits make it sqrt(2) times as
# much, twice. Four times that is allowed.
MARGIN = 2.0**-6
Record = dict[str, Any]


class Routers:
    """The routers' logits of one request after another, and, where asked for, the experts that they must choose."""

    def __init__(self, model: torch.nn.Module) -> None:
        gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self._logits: list[list[torch.Tensor]] = [[] for _ in gates]
        self._experts: list[list[torch.Tensor]] = [[] for _ in gates]
        self.top_k = next(module.top_k for module in model.modules() if hasattr(module, "top_k"))
        self._forced: torch.Tensor | None = None
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(self._hook(layer))

    def begin(self, forced: torch.Tensor | None = None) -> None:
        """Before a request. forced: int64 [positions, layers, k], the experts of each position and layer."""
        self._forced = forced
        for seen in (*self._logits, *self._experts):
            seen.clear()

    def seen(self) -> dict[str, torch.Tensor]:
        """Since `begin`: `logits` float32 [positions, layers, experts], and the `experts` int64 [positions, layers, k]
        that follow from them.
        """
        parts = {"logits": self._logits, "experts": self._experts}
        return {name: torch.stack([torch.cat(seen) for seen in layers], 1) for name, layers in parts.items()}

    def _hook(self, layer: int) -> Any:
        def hook(_gate: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            logits, bias = output
            start = sum(map(len, self._logits[layer]))
            self._logits[layer].append(logits.float().cpu())
            # As vLLM's router does it, so that equal logits mean the same experts.
            self._experts[layer].append(logits.float().softmax(-1).topk(self.top_k).indices.cpu())
            if self._forced is None:
                return output
            chosen = self._forced[start : start + len(logits), layer].to(logits.device)
            # The softmax over the rest is what a router that renormalizes makes of them.
            others = torch.full_like(logits, -torch.inf)
            return others.scatter(1, chosen, logits.gather(1, chosen)), bias

        return hook


def margins(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """By how much the last expert taken leads the first left out, in deviations; logits [..., experts]."""
    best = logits.topk(top_k + 1).values
    return (best[..., top_k - 1] - best[..., top_k]) / logits.std(-1)


def differing(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """bool [positions, layers]: whether experts [positions, layers, k] differ."""
    return torch.ne(one.sort().values, two.sort().values).any(-1)


def roots(differ: torch.Tensor) -> torch.Tensor:
    """The entries of `differ` [positions, layers] without an earlier one: in a lower layer, of any token so far.

    A position's layer computes with the results of lower layers at this token and those before.
    """
    below = differ.int().cumsum(0).cumsum(1)  # of this and earlier positions, in this and lower layers
    before = torch.nn.functional.pad(below, (1, 0))[:, :-1]
    return differ & (before == 0)


def judge_text(reference: Record, other: Record, forced: Record, top_k: int) -> dict[str, Any] | None:
    """Where two texts part, what the routers did until then, and what of it is left with equal experts.

    `by_experts` holds under two conditions. Routers took different experts, at first where the margin was below MARGIN.
    With the reference's experts, the other engine has the reference's gap between the two tokens, within GAP.
    """
    parting = first_difference(reference["steps"], other["steps"])
    if parting is None:
        return None
    token = parting["token"]
    positions = len(reference["prompt"]) + token
    differ = differing(*(text["experts"][:positions] for text in (reference, other)))
    places = [
        {
            "position": place[0],
            "layer": place[1],
            "margins": [round(float(margins(text["logits"][place], top_k)), 5) for text in (reference, other)],
            "experts": [sorted(text["experts"][place].tolist()) for text in (reference, other)],
        }
        for place in map(tuple, roots(differ).nonzero().tolist())
    ]
    step, chosen = forced["steps"][token], str(parting["tokens"][1])
    kept = round(step["logprob"] - step["top"][chosen], 4) if chosen in step["top"] else None
    alike = None not in (kept, parting["gap"]) and abs(kept - parting["gap"]) <= GAP
    return parting | {
        "sets_that_differ": int(differ.sum()),
        "first_of_them": places,
        "gap_with_the_reference_s_experts": kept,
        "by_experts": bool(places) and alike and all(min(place["margins"]) < MARGIN for place in places),
    }


def apart(texts: list[Record], read_texts: list[Record]) -> list[float]:
    """By how much each token's log probability differs between who wrote the texts and who read them."""
    return [
        abs(one["logprob"] - two["logprob"])
        for text, seen in zip(texts, read_texts, strict=True)
        for one, two in zip(text["steps"], seen["steps"], strict=True)
    ]


def judge(reference: Record, other: Record) -> dict[str, Any]:
    """All texts; `passed` where all that part beyond GAP do so by experts."""
    top_k = reference["top_k"]
    partings = []
    for number, texts in enumerate(zip(reference["texts"], other["texts"], other["forced"], strict=True)):
        if (found := judge_text(*texts, top_k)) is not None:
            partings.append({"prompt": number} | found)
    pairs = list(zip(reference["texts"], other["free"], other["forced"], strict=True))
    differ = [differing(text["experts"], free["experts"]) for text, free, _ in pairs]
    first = [roots(one) for one in differ]
    at_roots = [margins(text["logits"], top_k)[one] for (text, _, _), one in zip(pairs, first, strict=True)]
    moved = [
        ((text["logits"] - seen["logits"]).abs() / text["logits"].std(-1, keepdim=True)).max().item()
        for text, _, seen in pairs
    ]
    every = torch.cat([margins(text["logits"], top_k).flatten() for text, _, _ in pairs])
    return {
        "passed": all(one["by_experts"] or (one["gap"] is not None and one["gap"] <= GAP) for one in partings),
        "gap_allowed": GAP,
        "margin_allowed": MARGIN,
        "texts": {"all": len(pairs), "equal": len(pairs) - len(partings)},
        "choices_of_experts": {
            "all": len(every),
            "median_margin": round(every.median().item(), 4),
            "below_the_margin_allowed": int((every < MARGIN).sum()),
            "differ": int(sum(one.sum() for one in differ)),
            "differ_first": int(sum(one.sum() for one in first)),
            "largest_margin_where_they_differ_first": _largest(at_roots),
        },
        "largest_difference_of_a_router_s_logits_with_equal_experts": round(max(moved), 5),
        "log_probabilities": {
            name: {"largest": round(max(values), 4), "mean": round(sum(values) / len(values), 5)}
            for name, values in (
                ("own_experts", apart(reference["texts"], other["free"])),
                ("the_reference_s_experts", apart(reference["texts"], other["forced"])),
                ("the_other_way_round_own_experts", apart(other["texts"], reference["free"])),
                ("the_other_way_round_the_other_s_experts", apart(other["texts"], reference["forced"])),
            )
        },
        "partings": partings,
    }


def _largest(parts: list[torch.Tensor]) -> float | None:
    joined = torch.cat(parts)
    return round(joined.max().item(), 5) if len(joined) else None
