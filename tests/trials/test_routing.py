"""Routers that are watched or forced, and texts that part because of a near tie between experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trials import routing
from trials.compare import compare

from .test_compare import answers


def record(*texts: tuple[list[dict[str, Any]], torch.Tensor]) -> list[dict[str, Any]]:
    """Texts of a prompt of one token, with routers' logits [positions, layers, 3 experts]; one expert is taken."""
    return [
        {"prompt": [9], "steps": steps, "logits": logits, "experts": logits.topk(1).indices} for steps, logits in texts
    ]


Place = tuple[int, int] | None


def routers(lead: float, swapped: Place = None, upset: Place = None) -> torch.Tensor:
    """Logits of 4 positions and 3 layers. At (1, 1) the first expert leads by `lead` only, at `swapped` the second so,
    and at `upset` the third leads by far.
    """
    logits = torch.tensor([2.0, 0.0, -2.0]).repeat(4, 3, 1)
    logits[1, 1] = torch.tensor([1.0 + lead, 1.0, -2.0])
    if swapped:
        logits[swapped] = torch.tensor([1.0, 1.0 + lead, -2.0])
    if upset:
        logits[upset] = torch.tensor([-2.0, 0.0, 2.0])
    return logits


FAR = {"1": -0.5, "2": -1.0, "3": -4.0}  # likelihoods at which no rounding chooses 2
NEAR = 1e-3


def far_text(*tokens: int, likely: dict[str, float] = FAR) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": likely[str(token)], "top": likely} for token in tokens]


@pytest.mark.parametrize(
    ("lead", "swapped", "upset", "forced", "by_experts"),
    [
        (NEAR, (1, 1), None, FAR, True),
        (NEAR, (1, 1), (2, 2), FAR, True),  # what follows from it may be anything
        (NEAR, (1, 1), (0, 2), FAR, False),  # but not what happened before it
        (NEAR, (1, 1), (2, 0), FAR, False),  # nor what lies below it
        (0.5, (1, 1), None, FAR, False),  # no near tie
        (NEAR, None, None, FAR, False),  # the same experts
        (NEAR, (3, 1), None, FAR, False),  # others only once the texts have parted
        (NEAR, (1, 1), None, {"1": -1.0, "2": -0.5, "3": -4.0}, False),  # with equal experts they part all the same
    ],
)
def test_texts_part_by_experts_only_after_a_near_tie_and_not_with_equal_experts(
    lead: float, swapped: Place, upset: Place, forced: dict[str, float], by_experts: bool
) -> None:
    reference = record((far_text(1, 1, 1), routers(lead)))
    other = record((far_text(1, 1, 2), routers(lead, swapped, upset)))
    read = record((far_text(1, 1, 1, likely=forced), routers(lead)))
    judged = routing.judge(
        {"texts": reference, "top_k": 1, "free": other, "forced": other},
        {"texts": other, "top_k": 1, "free": read, "forced": read},
    )
    (parting,) = judged["partings"]
    assert (parting["token"], parting["by_experts"], judged["passed"]) == (2, by_experts, by_experts)
    ours, theirs = (answers(one[0]["steps"]) for one in (reference, other))
    assert not compare(ours, theirs)["passed"]
    assert compare(ours, theirs, judged)["passed"] is by_experts


def test_routers_take_the_experts_that_they_are_made_to_take() -> None:
    class Gate(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return super().forward(x), None

    gate = Gate(8, 5)
    model: Any = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": gate})})})
    model.top_k = 2
    watched = routing.Routers(model)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    watched.begin()
    own = torch.cat([gate(x[:4])[0], gate(x[4:])[0]])  # a prompt, then the rest
    seen = watched.seen()
    torch.testing.assert_close(seen["logits"], own[:, None].detach())
    assert torch.equal(seen["experts"][:, 0], own.topk(2).indices)
    others = torch.stack([torch.tensor([index % 5, (index + 2) % 5]) for index in range(6)])
    watched.begin(others[:, None])
    forced = torch.cat([gate(x[:4])[0], gate(x[4:])[0]])
    assert torch.equal(forced.topk(2).indices.sort().values, others.sort().values)
    expected = own.gather(1, others).softmax(-1)  # what a router that renormalizes gives these two
    torch.testing.assert_close(forced.softmax(-1).gather(1, others), expected)
    assert torch.equal(watched.seen()["logits"], seen["logits"])
