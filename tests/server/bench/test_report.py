import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.bench.client import Outcome
from server.bench.load import Closed, Open
from server.bench.measures import summarize
from server.bench.prompts import Target
from server.bench.report import Report, as_text, warnings
from server.bench.run import BenchSettings, LevelResult, Warmup
from server.cli import app
from tests.server.bench.conftest import level, outcome
from tests.server.conftest import make_model, serving

SETTINGS = BenchSettings(8, 5, (Closed(4), Open(2.0)))


def results() -> list[LevelResult]:
    good = [outcome(number / 4, 1.0 + number / 4, 0.1, 5) for number in range(4)]
    bad = Outcome(0.0, 0.0, (), 1.0, 0, 0, "503: <busy>")
    return [level([*good, bad], 3.0), level(good, 3.0, Open(2.0))]


def report() -> Report:
    return Report(Target("http://x", "my <model>", "vs-secret"), SETTINGS, {}, {"cpu": "c", "cores": 2,
                  "load_average": 0.1}, "2026-01-02", "voltserve bench", "a note")  # fmt: skip


def test_the_folder_holds_figures_requests_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    report().write(tmp_path / "a" / "b", results())
    value = json.loads((tmp_path / "a/b/bench.json").read_text())
    assert [one["level"] for one in value["levels"]] == ["×4", "2/s"]
    assert value["levels"][0]["ttft"]["p50"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "a/b/requests.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    assert rows[4] == {
        **{"level": "×4", "due": 0.0, "sent": 0.0, "first": None, "last": 1.0, "pieces": 0},
        **{"prompt_tokens": 0, "output_tokens": 0, "error": "503: <busy>"},
    }
    page = (tmp_path / "a/b/index.html").read_text()
    assert page.count("<svg") == 4
    assert "my &lt;model&gt;" in page
    assert "503: &lt;busy&gt;" in page
    assert "tok/s, theirs" in page
    assert not re.search(r'(?:src|href)="(?!#)', page), "the page refers to something beside it"
    assert "#0a0b" not in page, "a colour was left that no style sheet names"
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "a/b").iterdir())


def test_a_level_where_nothing_worked_still_makes_a_page(tmp_path: Path) -> None:
    failed = level([Outcome(0.0, 0.0, (), 1.0, 0, 0, "reset")], 1.0)
    report().write(tmp_path, [failed])
    assert "No request succeeded" in (tmp_path / "index.html").read_text()
    assert "×4: 1 × reset" in as_text([failed])


def test_what_makes_figures_doubtful_is_said() -> None:
    busy = LevelResult(Closed(4), Warmup(4, 0, 0.1), 3.0, (outcome(0.0, 1.0, 0.1, 5),), 0.9, 0.2)
    late = level([outcome(2.0, 3.0, 0.1, 5, due=1.0)], 4.0, Open(1.0))
    told = warnings([summarize(one) for one in (busy, late, *results())])
    assert [text.partition(":")[0] for text in told] == ["×4", "1/s", "×4"]
    assert "used 90% of a core" in told[0]
    assert "were sent 1000 ms late" in told[1]
    assert "1 of 5 requests failed" in told[2]


@pytest.mark.parametrize(("fail_every", "code"), [(0, 0), (3, 1)])
def test_the_command_measures_through_the_gateway(tmp_path: Path, fail_every: int, code: int) -> None:
    with serving(make_model(tmp_path / "model", fail_every=fail_every)) as served:
        served.wait_for_state("ready")
        out = tmp_path / "out"
        flags = ["--url", served.url, "--concurrency", "1,2", "--input-len", "16", "--output-len", "4"]
        ran = CliRunner().invoke(app, ["bench", *flags, "--requests", "6", "--out", str(out), "--note", "a test"])
    assert ran.exit_code == code, ran.output
    value = json.loads((out / "bench.json").read_text())
    assert value["server"]["preset"] == "cpu-smoke"
    assert [one["requests"] for one in value["levels"]] == [6, 6]
    assert sum(one["failed"] for one in value["levels"]) == (4 if fail_every else 0)
    assert value["note"] == "a test"


def test_a_server_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["bench", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)])
    assert ran.exit_code == 1
    assert "voltserve: http://127.0.0.1:9/v1/models: expected an answer" in ran.stderr
    assert "Traceback" not in ran.output
