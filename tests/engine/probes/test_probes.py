"""The probes' own arithmetic on the CPU; with GPUs they were run by hand (docs/results)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.probes import p2p

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_what_arrives_whole_is_not_wrong() -> None:
    assert p2p.copy_and_compare("cpu", "cpu", 4096, seed=1) == 0


def test_a_write_that_never_lands_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, _: self)
    assert p2p.copy_and_compare("cpu", "cpu", 4096, seed=1) == 1024


def test_one_changed_element_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.copy_

    def flip(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copy(self, other)
        self[7] ^= 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", flip)
    assert p2p.copy_and_compare("cpu", "cpu", 4096, seed=1) == 1


def test_a_pair_is_tried_with_all_sizes() -> None:
    answer = p2p.try_pair("cpu", "cpu")
    assert answer["wrong"] == 0
    assert answer["bytes"] == p2p.SIZES[-1]
    assert answer["gb_per_s"] > 0


def test_two_ranks_reduce_to_the_right_sums() -> None:
    answer = run("engine.probes.all_reduce", "--ranks", "2", "--backend", "gloo")
    assert (answer["ranks"], answer["wrong"]) == (2, 0)
