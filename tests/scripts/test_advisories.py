from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts import advisories
from scripts.advisories import KNOWN, judged, pins, rows

FIXED, AFFECTS = {"id": "A", "fixed": "0.28.0"}, {"id": "A", "affects": ">=2,<3"}


@pytest.mark.parametrize(
    ("advisory", "version", "state"),
    [
        (FIXED, "0.28.0", "fixed by"),
        (FIXED, "0.27.1", "open"),
        (FIXED | {"not reachable because": "x"}, "0.27.1", "not reachable because"),
        (AFFECTS, "3.0", "not affected"),
        (AFFECTS, "2.10.0", "open"),
        (AFFECTS | {"not reachable because": "x"}, "2.10.0", "not reachable because"),
    ],
)
def test_an_advisory_is_judged_by_the_pinned_version(advisory: dict[str, Any], version: str, state: str) -> None:
    assert judged(advisory, {version})[0] == state


def test_one_of_several_pinned_versions_keeps_it_open() -> None:
    assert judged(FIXED, {"0.27.1", "0.28.0"})[0] == "open"


@pytest.mark.parametrize("extra", [{}, {"fixed": "1", "affects": ">=1"}])
def test_an_advisory_without_one_range_is_refused(extra: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="A: expected either `fixed` or `affects`"):
        judged({"id": "A"} | extra, {"1"})


def test_every_known_advisory_is_of_a_package_that_is_pinned_or_was() -> None:
    known = yaml.safe_load(KNOWN.read_text())["advisories"]
    assert {advisory["package"] for advisory in known} <= pins().keys()
    assert len(rows(known, pins())) == len(known)


def test_what_only_the_database_knows_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        advisories, "from_osv", lambda _: [("GHSA-new", "vllm", "0.28.0"), ("CVE-2026-4538", "torch", "2")]
    )
    monkeypatch.setattr("sys.argv", ["advisories", str(tmp_path / "out.json")])
    assert advisories.main() == 1
    made = json.loads((tmp_path / "out.json").read_text())
    (new,) = [row for row in made["advisories"] if "GHSA-new" in row["ids"]]
    assert (made["osv"], new["state"]) == ("asked", "open")
    assert "open: vllm 0.28.0: GHSA-new" in capsys.readouterr().out


def test_a_database_that_is_not_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(advisories, "from_osv", away)
    monkeypatch.setattr("sys.argv", ["advisories", str(tmp_path / "out.json")])
    advisories.main()
    assert json.loads((tmp_path / "out.json").read_text())["osv"].startswith("not reached (ConnectError)")
