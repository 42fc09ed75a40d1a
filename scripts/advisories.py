"""Writes what public advisories mean for the pinned packages: docs/results/advisories-DATE.json.

    python -m scripts.advisories docs/results/advisories-DATE.json

Each advisory is `fixed by` a release that the pin has reached, `not affected`, `not reachable because`, or `open`.
configs/advisories.yaml holds what is known and how it was judged. OSV's database (osv.dev) is asked for the rest; an
advisory that only OSV knows is open until somebody judges it. Where OSV cannot be reached, the result says so. Ends
with 1 if any advisory is open.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "configs" / "advisories.yaml"
LOCKS = ("engine.lock", "ray.lock", "torch.lock", "vllm.lock")
OSV = "https://api.osv.dev/v1/querybatch"
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", re.MULTILINE)


def pins() -> dict[str, set[str]]:
    """Each package of the lock files with its versions; some differ by Python's."""
    found: dict[str, set[str]] = {}
    for name in LOCKS:
        for package, version in _PIN.findall((ROOT / "requirements" / name).read_text()):
            found.setdefault(package.lower(), set()).add(version)
    return found


def judged(advisory: Mapping[str, Any], versions: set[str]) -> tuple[str, str]:
    """(state, why) of one advisory of configs/advisories.yaml, for the pinned versions of its package."""
    fixed, affects = advisory.get("fixed"), advisory.get("affects")
    if (fixed is None) == (affects is None):
        raise ValueError(f"{advisory['id']}: expected either `fixed` or `affects` in {KNOWN.name}")
    if fixed is not None and all(Version(version) >= Version(str(fixed)) for version in versions):
        return "fixed by", str(fixed)
    if affects is not None and not any(version in SpecifierSet(affects) for version in versions):
        return "not affected", str(affects)
    if why := advisory.get("not reachable because"):
        return "not reachable because", str(why)
    return "open", f"fixed in {fixed}" if fixed else "no fix is known"


def from_osv(pinned: Mapping[str, set[str]]) -> list[tuple[str, str, str]]:
    """(advisory, package, version) of each that OSV lists for a pinned version. Raises httpx.HTTPError."""
    asked = [(package, version) for package, versions in sorted(pinned.items()) for version in sorted(versions)]
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in asked]
    reply = httpx.post(OSV, json={"queries": queries}, timeout=30)
    reply.raise_for_status()
    results = reply.json()["results"]
    return [
        (found["id"], package, version)
        for (package, version), result in zip(asked, results, strict=True)
        for found in result.get("vulns", [])
    ]


def rows(known: list[dict[str, Any]], pinned: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """One row per known advisory of a package that is pinned."""
    made = []
    for advisory in known:
        if versions := pinned.get(advisory["package"]):
            state, why = judged(advisory, versions)
            ids = [advisory["id"], *advisory.get("aliases", [])]
            row = {"ids": ids, "package": advisory["package"], "pinned": sorted(versions), "what": advisory["what"]}
            made.append(row | {"state": state, "why": why})
    return made


def main() -> int:
    """Returns 1 if any advisory is open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    pinned = pins()
    made = rows(yaml.safe_load(KNOWN.read_text())["advisories"], pinned)
    seen = {name for row in made for name in row["ids"]}
    try:
        for name, package, version in from_osv(pinned):
            if name not in seen:
                row = {"ids": [name], "package": package, "pinned": [version], "what": f"https://osv.dev/{name}"}
                made.append(row | {"state": "open", "why": f"nobody has judged it in configs/{KNOWN.name}"})
        database = "asked"
    except httpx.HTTPError as error:
        database = f"not reached ({type(error).__name__}): only what configs/{KNOWN.name} names is listed"
    result = {
        "what": "advisories of the pinned packages",
        "command": f"python -m scripts.advisories {arguments.output}",
        "date": datetime.date.today().isoformat(),
        "osv": database,
        "packages": len(pinned),
        "advisories": made,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    still_open = [row for row in made if row["state"] == "open"]
    for row in still_open:
        print(f"open: {row['package']} {', '.join(row['pinned'])}: {' '.join(row['ids'])}: {row['what']}; {row['why']}")
    print(f"{len(made)} advisories, {len(still_open)} open; OSV: {database}")
    return int(bool(still_open))


if __name__ == "__main__":
    sys.exit(main())
