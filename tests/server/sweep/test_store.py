import json
from pathlib import Path

import pytest

from server.errors import ConfigError
from server.sweep.grid import Point
from server.sweep.store import FILE, Record, Store

CONDITIONS = {"arguments": ["--model", "m"], "load": ["×1"]}
POINT = Point((("max-num-seqs", 8), ("enforce-eager", True)))
RECORD = Record(dict(POINT.values), "failed", "out of memory", {"title": "CUDA out of memory"})


def test_a_record_is_there_again_when_the_sweep_is_opened_again(tmp_path: Path) -> None:
    Store(tmp_path, CONDITIONS).add(RECORD)
    again = Store(tmp_path, CONDITIONS)
    assert again.find(POINT) == RECORD
    assert again.find(Point((("enforce-eager", True), ("max-num-seqs", 8)))) == RECORD
    assert again.find(Point((("max-num-seqs", 16), ("enforce-eager", True)))) is None


@pytest.mark.parametrize("cut", range(1, 200, 13))
def test_a_line_cut_off_while_it_was_written_is_measured_again_and_nothing_else_lost(tmp_path: Path, cut: int) -> None:
    store = Store(tmp_path, CONDITIONS)
    other = Record({"max-num-seqs": 16, "enforce-eager": True}, "skipped", "does not fit")
    store.add(other)
    store.add(RECORD)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-cut])
    again = Store(tmp_path, CONDITIONS)
    left = whole[:-cut].count(b"\n")
    assert len(again.records) == max(0, left - 1)
    again.add(RECORD)
    assert Store(tmp_path, CONDITIONS).find(POINT) == RECORD


def test_a_sweep_under_other_conditions_is_refused_by_what_differs(tmp_path: Path) -> None:
    Store(tmp_path, CONDITIONS).add(RECORD)
    with pytest.raises(ConfigError, match=r"load: expected \['×8'\], got \['×1'\]\); choose another --out"):
        Store(tmp_path, {**CONDITIONS, "load": ["×8"]})


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    Store(tmp_path, CONDITIONS).add(RECORD)
    with (tmp_path / FILE).open("a") as file:
        file.write("{broken\n" + json.dumps({}) + "\n")
    with pytest.raises(ConfigError, match="line 3: not JSON"):
        Store(tmp_path, CONDITIONS)
