"""What another vLLM release changes under our overlay: each name that our code takes from vLLM, in two releases.

Neither release is imported: their sources are parsed, so a release whose packages are not installed can be examined.

    python -m scripts.engine_diff .venv/lib/python3.11/site-packages /path/to/unpacked/vllm-0.33.0

Prints one line per name that is missing or changed, and exits with 1 if one is missing.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from trials.engine_diff import Release, compare, used


def main(
    before: Annotated[Path, typer.Argument(help="folder that holds the present release's vllm/")],
    after: Annotated[Path, typer.Argument(help="folder that holds the candidate's vllm/")],
    root: Annotated[Path, typer.Option(help="our sources")] = Path(),
) -> None:
    """Prints the names of vLLM that our code uses and the candidate lacks or changed."""
    old, new = Release(before), Release(after)
    names = used(root)
    found = [(name, verdict) for name in names if (verdict := compare(name, old, new))]
    order = ("missing", "signature", "body")
    for name, verdict in sorted(found, key=lambda pair: order.index(re.match(r"\w+", pair[1])[0])):  # type: ignore[index]
        typer.echo(f"{name}  {verdict}  ({name.user})")
    missing = sum(verdict.startswith("missing") for _, verdict in found)
    typer.echo(f"{len(names)} names; {missing} missing, {len(found) - missing} changed")
    raise typer.Exit(1 if missing else 0)


if __name__ == "__main__":
    typer.run(main)
