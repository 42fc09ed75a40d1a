"""`voltserve version`: what is installed, and whether another version's settings are still taken."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.common import AsJson, group, print_json, user_errors

if TYPE_CHECKING:
    from server.config.check import Outdated

app = group()


@app.command()
def version(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="With --check-config: .env, presets, files of --engines. Without any: .env here, and the environment.",
        ),
    ] = None,
    check_config: Annotated[
        bool,
        typer.Option("--check-config", help="List settings that this version no longer takes; 1 if there are any."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the versions of voltserve, its engine and torch; or check another version's settings before an upgrade."""
    from importlib.metadata import version as version_of

    versions = {name: version_of(name) for name in ("voltserve", "vllm", "torch")}
    found: list[Outdated] = []
    with user_errors():
        if files and not check_config:
            from server.errors import UserError

            raise UserError("version takes files only with --check-config")
        if check_config:
            found = _check(files or [], versions["voltserve"])
    if as_json:
        print_json({**versions, **({"outdated": [one.as_dict() for one in found]} if check_config else {})})
    else:
        print(" ".join(f"{name} {number}" for name, number in versions.items()))
        for one in found:
            print(one)
        if check_config and not found:
            print("every setting is taken as it is")
    raise typer.Exit(1 if any(not one.note for one in found) else 0)


def _check(files: list[Path], version: str) -> "list[Outdated]":
    import os

    from server.config.check import check_file, check_variables

    if files:
        return [one for path in files for one in check_file(path, version)]
    here = Path(".env")
    found = check_variables(os.environ, "environment")
    return [*(check_file(here, version) if here.is_file() else []), *found]
