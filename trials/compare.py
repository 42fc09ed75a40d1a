"""Two engines' answers compared: greedy texts and perplexities."""

from collections.abc import Sequence
from typing import Any

# Natural logarithms between the reference's two likeliest tokens. float16 activations move them by this much at most.
GAP = 0.1
PERPLEXITY = 0.005


def first_difference(reference: Sequence[Any], other: Sequence[Any]) -> dict[str, Any] | None:
    """Where two greedy texts part, and how much likelier the reference held its own token; None where they do not.

    `tokens` are the reference's and the other's; `gap` is None where the latter was not among the reference's likeliest
    five.
    """
    for index, (one, two) in enumerate(zip(reference, other, strict=True)):
        if one["token"] != two["token"]:
            likelihood = one["top"].get(str(two["token"]))
            gap = None if likelihood is None else round(one["logprob"] - likelihood, 4)
            return {"token": index, "tokens": [one["token"], two["token"]], "gap": gap}
    return None


def noise(reference: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference of a token's log probability while the texts are the same."""
    largest = 0.0
    for one, two in zip(reference, other, strict=True):
        if one["token"] != two["token"]:
            break
        largest = max(largest, abs(one["logprob"] - two["logprob"]))
    return largest


def compare(reference: dict[str, Any], other: dict[str, Any], routing: dict[str, Any] | None = None) -> dict[str, Any]:
    """All of it, with `passed`. routing: what routing.py found in the same two models."""
    by_experts = [_place(one) for one in routing["partings"] if one["by_experts"]] if routing else []
    result: dict[str, Any] = {"passed": True, "gap_allowed": GAP, "perplexity_allowed": PERPLEXITY}
    for way in ("alone", "together"):
        pairs = list(zip(reference[way], other[way], strict=True))
        differences = [
            {"prompt": number} | found
            for number, pair in enumerate(pairs)
            if (found := first_difference(*pair)) is not None
        ]
        result[way] = {
            "prompts": len(pairs),
            "tokens_each": len(pairs[0][0]),
            "equal": len(pairs) - len(differences),
            "largest_log_probability_difference": round(max(noise(*pair) for pair in pairs), 4),
            "first_differences": differences,
        }
        for one in differences:
            one["by_experts"] = _place(one) in by_experts
            result["passed"] &= one["by_experts"] or (one["gap"] is not None and one["gap"] <= GAP)
    ratio = other["perplexity"] / reference["perplexity"] - 1
    result["perplexity"] = {
        "reference": round(reference["perplexity"], 5),
        "other": round(other["perplexity"], 5),
        "difference": round(ratio, 6),
        "tokens": reference["perplexity_tokens"],
    }
    result["passed"] &= abs(ratio) <= PERPLEXITY
    return result


def _place(parting: dict[str, Any]) -> tuple[int, int, list[int]]:
    return parting["prompt"], parting["token"], parting["tokens"]
