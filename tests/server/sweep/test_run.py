import json
from pathlib import Path
from typing import Any

import pytest

from quant.progress import ignore_progress
from server.bench.load import Closed
from server.bench.run import BenchSettings
from server.config.presets import load_preset
from server.config.settings import load_config
from server.run import child
from server.sweep import run as running
from server.sweep.grid import Point
from server.sweep.report import Sweeping
from tests.server.conftest import make_model

SETTINGS = BenchSettings(8, 4, (Closed(2),), requests=4)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.78 GiB"


def sweeping(model: Path, out: Path, *varied: str) -> Sweeping:
    arguments = ("--model", str(model))
    return Sweeping.of(arguments, load_config(arguments), varied, SETTINGS, out, module="tests.fakes.serve")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(
        tmp_path / "model",
        answer={"delay": 0.03},
        when={
            "--block-size 32": {"answer": {"delay": 0.001}},
            "--block-size 64": {"print_lines": [OOM], "fail_first": 99},
            "--block-size 128": {"fail_every": 5},
        },
    )


def test_a_sweep_survives_points_that_fail_picks_the_fastest_and_goes_on_where_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = sweeping(model, out, "block-size=16,32,64,128")
    first.run(ignore_progress)
    records = {record.point["block-size"]: record for record in first.store.records.values()}
    assert {size: record.status for size, record in records.items()} == {
        **{16: "measured", 32: "measured", 64: "failed", 128: "failed"}
    }
    assert records[64].diagnosis is not None
    assert records[64].diagnosis["id"] == "cuda-out-of-memory"
    assert records[128].reason == "1 of 4 requests at ×2: 500: no room left"
    text, found = first.conclude(least_user=0)
    assert found
    assert "best: block-size=32" in text
    assert load_preset(out / "cpu-smoke-swept.yaml").limits["block-size"].provenance == "measured"
    assert "out of memory" in (out / "index.html").read_text()
    assert json.loads((out / "sweep.jsonl").read_text().splitlines()[0])["conditions"]["load"] == ["×2"]

    # Again, with one more value: only that one is started.
    starts: list[str] = []
    start = child.running

    def counted(*given: Any) -> Any:
        starts.append(given[0][-1])
        return start(*given)

    monkeypatch.setattr(running, "running", counted)
    again = sweeping(model, out, "block-size=16,32,64,128,48")
    again.run(ignore_progress)
    assert starts == ["48"]
    assert len(again.store.records) == 5


def test_what_the_plan_says_cannot_fit_is_skipped_with_its_reason_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plan:
        problems = ("20 GiB are needed of 14 GiB", "lower --max-model-len")

    class Planned:
        plan = Plan()

    monkeypatch.setattr(running, "plan_for", lambda config: Planned())
    monkeypatch.setattr(running, "running", lambda *_: pytest.fail("started although it cannot fit"))
    work = sweeping(make_model(tmp_path / "model"), tmp_path / "out", "max-num-seqs=8")
    work.run(ignore_progress)
    (record,) = work.store.records.values()
    assert (record.status, record.reason) == ("skipped", "20 GiB are needed of 14 GiB; lower --max-model-len")
    text, found = work.conclude(least_user=0)
    assert not found
    assert "no point was measured at all" in text


def test_the_plan_sees_a_points_flags_and_variables() -> None:
    point = Point((("max-num-seqs", 3), ("VLLM_CPU_KVCACHE_SPACE", "2")))
    config = running.config_at(("--model", "m"), point)
    assert config.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert config.engine["max-num-seqs"] == 3
