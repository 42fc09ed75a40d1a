"""Compares greedy texts of the CPU engine and of one and two GPUs: judge.py ANSWERS OUTPUT.json WAY… --device NAME

ANSWERS holds MODEL.cpu.json and MODEL.WAY.json for each model and way (prepare.py). Texts must be equal; where they
part, the CPU's token must have led the second likeliest by little, since then rounding decides. Exits with 1 where they
do not.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Natural logarithms; float16 moves these models' log probabilities by less.
LEAD = 0.1


def first_difference(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Where two texts part, and by how much the reference's token led there; None where they are equal."""
    pairs = zip(reference["tokens"], other["tokens"], reference["leads"], strict=True)
    for place, (one, two, lead) in enumerate(pairs):
        if one != two:
            return {"token": place, "lead": round(lead, 4)}
    return None


def compare(reference: list[dict[str, Any]], other: Any) -> dict[str, Any]:
    """One model's texts, with `passed`."""
    if not isinstance(other, list):
        return {"passed": False, "error": str(other["error"])[-2000:]}
    found = [first_difference(*pair) for pair in zip(reference, other, strict=True)]
    differences = [{"prompt": number} | one for number, one in enumerate(found) if one is not None]
    return {
        "passed": all(one["lead"] <= LEAD for one in differences),
        "prompts": len(found),
        "tokens_each": len(reference[0]["tokens"]),
        "equal": len(found) - len(differences),
        "first_differences": differences,
    }


def main() -> int:
    """Writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for path in sorted(arguments.answers.glob("*.cpu.json")):
        name = path.name.removesuffix(".cpu.json")
        reference = json.loads(path.read_text())
        for way in arguments.ways:
            other = arguments.answers / f"{name}.{way}.json"
            answer = json.loads(other.read_text()) if other.exists() else {"error": "not run"}
            rows[f"{name}, {way}"] = compare(reference, answer)
    passed = bool(rows) and all(row["passed"] for row in rows.values())
    result = {
        "what": "greedy texts on one and two GPUs, against the CPU engine's; ways: those of scripts/gpu_tp2/prepare.py",
        "provenance": "measured",
        "device": arguments.device,
        "command": " ".join(sys.argv),
        "lead_allowed": LEAD,
        "passed": passed,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name}: {row.get('equal')} of {row.get('prompts')} equal{'' if row['passed'] else ', FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
