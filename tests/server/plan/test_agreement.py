import json
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from lookalikes.public_models import dense
from server import logs
from server.cli import app
from server.plan.agreement import agreement
from tests.server.plan.test_model import write

PLAN = {
    "items": [{"bytes": 90}, {"bytes": 10}, {"bytes": 7}],
    "load_peak": {"bytes": 300},
    "cache": {"bytes": 2**30, "tokens": 23_296},
}
CACHE = "(EngineCore pid=7) INFO 11-30 [kv_cache_utils.py:1319] GPU KV cache size: {:,} tokens"


def log_of(form: str, *decisions: tuple[str, int], lines: tuple[str, ...] = ()) -> str:
    """What `serve` logs, in its own form."""
    written: list[str] = []
    logs.configure("info", form, written.append)
    log = structlog.get_logger("voltserve.supervisor")
    for what, size in decisions:
        log.info("decision", what=what, choice=f"{size} bytes", reason="once loaded")
    for line in lines:
        log.info(line)
    return "\n".join(written)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    folder = tmp_path / "qwen"
    folder.mkdir()
    shape, entries = dense("8B")
    return str(write(folder, shape, {"model.safetensors": entries}, index=False))


@pytest.mark.parametrize("form", ["text", "json"])
def test_figures_are_found_in_the_log_and_compared(form: str) -> None:
    sizes = (("weights in memory", 101), ("memory while loading", 270))
    rows = agreement(PLAN, log_of(form, *sizes, lines=(CACHE.format(23_296), "Available KV cache memory: 0.98 GiB")))
    assert {row.name: (row.planned, row.reported, row.agrees) for row in rows} == {
        "weights_bytes": (100, 101, True),
        "load_peak_bytes": (300, 270, False),
        "cache_bytes": (2**30, 0.98 * 2**30, True),
        "cache_tokens": (23_296, 23_296, True),
    }


def test_of_several_ranks_the_fullest_counts() -> None:
    sizes = (("weights in memory", 90), ("weights in memory", 100))
    rows = agreement(PLAN, log_of("text", *sizes, lines=(CACHE.format(24_000), CACHE.format(23_296))))
    assert [(row.name, row.off) for row in rows] == [("weights_bytes", 0), ("cache_tokens", 0)]


def test_of_several_starts_the_last_counts() -> None:
    first = log_of("text", ("weights in memory", 50), lines=(CACHE.format(1), "restart scheduled"))
    rows = agreement(PLAN, first + "\n" + log_of("text", ("weights in memory", 100)))
    assert [(row.name, row.reported) for row in rows] == [("weights_bytes", 100)]


def test_the_command_compares_and_its_exit_code_says_whether_they_agree(tmp_path: Path, qwen: str) -> None:
    command = ["plan", qwen, "--preset", "v100x1-16g"]
    planned = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    weights = sum(item["bytes"] for item in planned["items"][:2])
    log = tmp_path / "log"
    for factor, code in ((1.0, 0), (1.2, 1)):
        log.write_text(log_of("text", ("weights in memory", int(weights * factor))))
        done = CliRunner().invoke(app, [*command, "--against", str(log)])
        assert (done.exit_code, "too far" in done.stdout) == (code, bool(code)), done.stdout
        (row,) = json.loads(CliRunner().invoke(app, [*command, "--against", str(log), "--json"]).stdout)
        assert row["agrees"] is not bool(code)


def test_a_file_that_is_no_such_log_is_refused_by_name(tmp_path: Path, qwen: str) -> None:
    for path in (tmp_path / "none", Path(qwen) / "config.json"):
        done = CliRunner().invoke(app, ["plan", qwen, "--against", str(path)])
        assert done.exit_code == 2
        assert str(path) in done.stderr
