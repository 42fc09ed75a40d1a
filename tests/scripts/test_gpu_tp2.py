"""What the trials on two GPUs judge by, and what they compute for two V100s; the trials themselves need the GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_tp2 import judge
from scripts.gpu_tp2.prepare import MODELS, WAYS


def text(*tokens: int, lead: float = 1.0) -> dict[str, Any]:
    return {"tokens": list(tokens), "logprobs": [-1.0] * len(tokens), "leads": [lead] * len(tokens)}


@pytest.mark.parametrize(
    ("other", "passed", "differences"),
    [
        ([text(1, 2, 3)], True, []),
        ([text(1, 9, 9)], False, [{"prompt": 0, "token": 1, "lead": 1.0}]),
        ({"error": "Traceback …"}, False, None),
    ],
)
def test_texts_must_be_equal(other: Any, passed: bool, differences: list[Any] | None) -> None:
    row = judge.compare([text(1, 2, 3)], other)
    assert (row["passed"], row.get("first_differences")) == (passed, differences)


def test_a_text_may_part_where_the_reference_was_undecided() -> None:
    row = judge.compare([text(1, 2, 3, lead=0.05)], [text(1, 9, 9)])
    assert row["passed"]
    assert (row["equal"], row["first_differences"]) == (0, [{"prompt": 0, "token": 1, "lead": 0.05}])


@pytest.mark.parametrize("missing", ["", "peer"])
def test_every_model_is_compared_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in MODELS:
        for way in ("cpu", *WAYS):
            if way != missing:
                (tmp_path / f"{name}.{way}.json").write_text(json.dumps([text(1, 2)]))
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["judge.py", str(tmp_path), str(output), *WAYS, "--device", "none"])
    assert judge.main() == (1 if missing else 0)
    assert len(json.loads(output.read_text())["rows"]) == len(MODELS) * len(WAYS)


def test_nothing_compared_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["judge.py", str(tmp_path), str(output), *WAYS, "--device", "none"])
    assert judge.main() == 1
