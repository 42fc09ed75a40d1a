"""What every check on a GPU writes: nothing wrong goes unnoticed, and the file says what, where and when."""

import json
from pathlib import Path

import pytest
import torch

from kernels.tools.findings import Findings, parser


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-PCIE-16GB")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_check_without_failures_ends_with_0_and_a_whole_result(tmp_path: Path) -> None:
    findings = Findings()
    findings.within("product", "M=1", 0.25, "[0, 1]")
    findings.within("product", "M=2", 0.5, "[0, 2]")
    findings.expect("product", "other bits", holds=True)
    assert findings.finish("correctness", tmp_path / "result.json", library="a.so") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["what"] == "correctness"
    assert result["provenance"] == "measured"
    assert result["device"] == "Tesla V100-PCIE-16GB"
    assert result["library"] == "a.so"
    assert (result["cases"], result["failures"]) == (3, [])
    assert result["worst_error_of_allowed"] == {"product": 0.5}
    assert {"date", "torch", "command", "seconds"} <= set(result)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("share", [1.001, float("nan"), float("inf")])
def test_more_than_the_allowed_error_fails(share: float) -> None:
    findings = Findings()
    findings.within("product", "M=1", share, "[0, 1]")
    assert len(findings.failures) == 1
    assert "product M=1" in findings.failures[0]
    assert "[0, 1]" in findings.failures[0]
    assert findings.finish("correctness", None) == 1


def test_the_worst_element_is_named_and_nan_is_worst() -> None:
    findings = Findings()
    findings.all_within("scan", "D=128", torch.tensor([[0.1, 3.0], [torch.nan, 0.0]]))
    assert findings.failures == ["scan D=128: inf of the allowed error at [1, 0]"]
    findings.all_within("scan", "no tokens", torch.empty(0, 4))
    assert len(findings.failures) == 1


def test_a_broken_expectation_fails() -> None:
    findings = Findings()
    findings.expect("graph", "M=1: other bits", holds=False)
    assert findings.failures == ["graph M=1: other bits"]


def test_every_check_takes_an_output() -> None:
    assert parser("What it does.").parse_args(["--output", "a.json"]).output == Path("a.json")
