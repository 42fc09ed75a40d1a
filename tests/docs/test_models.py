from __future__ import annotations

import json
import re
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
BEFORE = Version("0.19.1")


def test_the_page_lists_every_architecture_that_the_engine_has_dropped() -> None:
    removed = json.loads((ROOT / "configs/engine_architectures.json").read_text())["removed"]
    section = (ROOT / "docs/models.md").read_text().partition("## Models that the engine has dropped")[2]
    rows = re.findall(r"^\| ([\d.]+) \| (.+) \|$", section, re.MULTILINE)
    said = {name: last for last, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert said == {name: last for name, last in removed.items() if Version(last) >= BEFORE}
