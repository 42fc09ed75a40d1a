"""What scripts/gpu_e2e/ carries to a GPU machine and judges afterwards; the runs themselves need one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookalikes import quasar
from lookalikes.quasar_config import SMALL
from quant.verify.report import verify
from scripts.gpu_e2e import pack, routing, synthetic, synthetic_hybrid, unpack
from scripts.gpu_e2e.compare import compare, first_difference, noise


def text(*tokens: int, shift: float = 0.0) -> list[dict[str, Any]]:
    likely = {str(token): -0.5 - 0.04 * index for index, token in enumerate((1, 2))} | {"3": -4.0}
    return [{"token": token, "logprob": likely[str(token)] + shift, "top": likely} for token in tokens]


def answers(*texts: list[dict[str, Any]], perplexity: float = 10.0) -> dict[str, Any]:
    return {"alone": list(texts), "together": list(texts), "perplexity": perplexity, "perplexity_tokens": 5}


@pytest.mark.parametrize(
    ("other", "passed"),
    [
        (answers(text(1, 1, 2)), True),
        (answers(text(1, 2, 3)), True),  # parted where both were almost equally likely
        (answers(text(1, 3, 2)), False),  # parted towards an unlikely token
        (answers(text(1, 1, 2), perplexity=10.04), True),
        (answers(text(1, 1, 2), perplexity=9.94), False),
    ],
)
def test_texts_may_part_only_where_rounding_decides(other: dict[str, Any], passed: bool) -> None:
    assert compare(answers(text(1, 1, 2)), other)["passed"] is passed


def test_a_token_beyond_the_likeliest_explains_nothing() -> None:
    other = text(1, 1)
    other[1]["token"] = 77
    assert first_difference(text(1, 1), other) == {"token": 1, "tokens": [1, 77], "gap": None}


def record(*texts: tuple[list[dict[str, Any]], torch.Tensor]) -> list[dict[str, Any]]:
    """Texts of a prompt of one token, with routers' logits [positions, layers, 3 experts], of which one is taken."""
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
        (NEAR, (1, 1), (0, 2), FAR, False),  # but not what came before it
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

    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": Gate(8, 5)})})})
    model.top_k = 2
    watched = routing.Routers(model)
    gate, x = model["layer"]["mlp"]["gate"], torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
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


def test_the_noise_is_taken_before_texts_part() -> None:
    other = [*text(1, shift=0.02), *text(2), *text(1, shift=9.0)]
    assert noise(text(1, 1, 1), other) == pytest.approx(0.02)


def test_a_model_is_the_same_after_the_journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(-127, 128, (6, 64), generator=torch.Generator().manual_seed(1)).float()
    codes.view(-1, 32)[:, 0] = 127  # each block of a Q8_0 GGUF has its largest value there
    scale = torch.rand(12, 1, generator=torch.Generator().manual_seed(2)).half()
    embedding = (codes.view(-1, 32) * scale.float()).half().view(6, 64)
    source, folder, parts = (tmp_path / name for name in ("source", "folder", "parts"))
    for path in (source, folder, parts):
        path.mkdir()
    tensors = {pack.EMBEDDING: embedding, "other": torch.arange(5)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    pack.lay_out_model(source, folder)
    pack.archive(folder, parts / "whole")
    data = (parts / "whole").read_bytes()
    (parts / "model.00").write_bytes(data[:100])
    (parts / "model.01").write_bytes(data[100:])
    monkeypatch.setattr(sys, "argv", ["unpack.py", str(parts), str(tmp_path / "there")])
    unpack.main()
    arrived = load_file(tmp_path / "there" / "model.safetensors")
    assert set(arrived) == set(tensors)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["config.json", "model.safetensors"]


def test_an_embedding_that_would_not_arrive_exactly_is_refused(tmp_path: Path) -> None:
    save_file({pack.EMBEDDING: torch.randn(2, 64).half()}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="expected values of a Q8_0 GGUF"):
        pack.lay_out_model(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["qwen3-32b", "moe"])
def test_a_synthetic_checkpoint_is_a_valid_model(tmp_path: Path, name: str) -> None:
    shape = synthetic.SHAPES[name]
    small = replace(shape, hidden=128, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=32, vocabulary=64)
    small = replace(small, experts=min(shape.experts, 2))
    written = synthetic.write(small, tmp_path)
    assert written == sum(
        tensor.nbytes for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values()
    )
    errors = [str(finding) for finding in verify(tmp_path).findings if finding.severity == "error"]
    assert all("tokenizer" in error for error in errors)  # trials ask with token ids, or bring SmolLM2's


def test_the_synthetic_27b_has_the_lookalikes_tensors(tmp_path: Path) -> None:
    sizes = replace(SMALL, layers=4)
    written = synthetic_hybrid.write(sizes, tmp_path / "synthetic")
    quasar.write(tmp_path / "lookalike", sizes)

    def tensors(folder: str) -> dict[str, tuple[str, list[int]]]:
        found = {}
        for path in (tmp_path / folder).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found[name] = (str(tensor.dtype), list(tensor.shape))
        return found

    made, expected = tensors("synthetic"), tensors("lookalike")
    left_out = ("model.visual.", ".input_global_scale")
    assert made == {
        name: what
        for name, what in expected.items()
        if not name.startswith(left_out[0]) and not name.endswith(left_out[1])
    }
    assert written == sum(path.stat().st_size for path in (tmp_path / "synthetic").glob("*.safetensors")) - sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in (tmp_path / "synthetic").glob("*.safetensors")
    )
