"""`voltserve keys`: the gateway's API keys."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import group, user_errors

app = group("API keys of the gateway (serve --keys-file).")

KeysFile = Annotated[
    Path, typer.Option("--file", metavar="FILE", envvar="VOLTSERVE_KEYS_FILE", help="File of keys.", dir_okay=False)
]


@app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whom the key is for; the log shows this name.")],
    file: KeysFile,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Limit of this key, instead of serve's; 0: none.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=0, help="Requests of this key at once, instead of serve's; 0: no limit.")
    ] = None,
) -> None:
    """Make a key and print it, once: only its digest is kept. A running gateway takes it at once."""
    from server.keys import add_key

    with user_errors():
        print(add_key(file, name, requests_per_minute, max_concurrent))


@app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys' names, dates and limits."""
    from server.keys import read_keys

    with user_errors():
        keys = read_keys(file)
    for key in keys:
        limits = {"requests a minute": key.requests_per_minute, "at once": key.max_concurrent}
        told = "; ".join(
            f"{what}: {'as serve has it' if value is None else value or 'no limit'}" for what, value in limits.items()
        )
        print(f"{key.name}  {key.created:%Y-%m-%d}  {told}")


@app.command("revoke")
def keys_revoke(name: Annotated[str, typer.Argument(help="Name of the key.")], file: KeysFile) -> None:
    """Remove a key. A running gateway refuses it at once; requests under way finish."""
    from server.keys import revoke_key

    with user_errors():
        revoke_key(file, name)
    print(f"{name} is revoked")
