"""`voltserve keys`: the gateway's API keys."""

import json
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import group, user_errors
from server.environment import KEYS_FILE, USAGE_FILE

app = group("API keys of the gateway (serve --keys-file).")

KeysFile = Annotated[
    Path, typer.Option("--file", metavar="FILE", envvar=KEYS_FILE, help="File of keys.", dir_okay=False)
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
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Last day on which it is valid, in UTC.")
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option(help="A model name that it may ask for; may be repeated. Default: all.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers a day, from 00:00 UTC on.")
    ] = None,
) -> None:
    """Make a key and print it, once: only its digest is kept. A running gateway takes it at once."""
    from server.keys import add_key

    with user_errors():
        key = add_key(
            file,
            name,
            requests_per_minute=requests_per_minute,
            max_concurrent=max_concurrent,
            expires=expires and expires.date(),
            models=models or None,
            tokens_per_day=tokens_per_day,
        )
    print(key)


@app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys' names, dates and limits."""
    from server.keys import read_keys

    with user_errors():
        keys = read_keys(file)
    for key in keys:
        of_requests = {"requests a minute": key.requests_per_minute, "at once": key.max_concurrent}
        limits = "; ".join(
            f"{what}: {'as serve has it' if value is None else value or 'no limit'}"
            for what, value in of_requests.items()
        )
        expiry = f"{key.expires} at its end" if key.expires else "never"
        models = ", ".join(key.models) if key.models else "all"
        budget = key.tokens_per_day or "no limit"
        print(
            f"{key.name}  {key.created:%Y-%m-%d}  {limits}; expires: {expiry}; models: {models}; tokens a day: {budget}"
        )


@app.command("usage")
def keys_usage(
    file: KeysFile,
    usage_file: Annotated[
        str, typer.Option(metavar="FILE", envvar=USAGE_FILE, help="As serve's; default: beside the keys.")
    ] = "",
    days: Annotated[int, typer.Option(min=1, help="Days to show, today among them.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Every day, key and model, as JSON.")] = False,
) -> None:
    """Show the tokens that each key used. A running gateway writes them every 2 seconds; days are UTC's."""
    from server.keys import read_keys
    from server.usage import Counts, UsageFile, usage_path

    today = datetime.now(timezone.utc).date()
    with user_errors():
        keys = read_keys(file)
        rows = UsageFile(usage_path(str(file), usage_file)).since(today - timedelta(days=days - 1))
    if as_json:
        print(
            json.dumps(
                [{"day": str(row.day), "key": row.key, "model": row.model, **asdict(row.counts)} for row in rows]
            )
        )
        return
    budgets = {key.name: key.tokens_per_day for key in keys}
    for name in sorted(budgets.keys() | {row.key for row in rows}):
        used = [row for row in rows if row.key == name]
        total = sum((row.counts for row in used), Counts())
        spent = sum(row.counts.tokens for row in used if row.day == today)
        budget = f" of {budgets[name]}" if budgets.get(name) else ""
        uncounted = f", {total.uncounted} of them not counted whole" if total.uncounted else ""
        revoked = "" if name in budgets else " (revoked)"
        print(
            f"{name}{revoked}  today: {spent}{budget} tokens; {days} days: {total.prompt} in, {total.completion} out, "
            f"{total.requests} requests{uncounted}"
        )


@app.command("revoke")
def keys_revoke(name: Annotated[str, typer.Argument(help="Name of the key.")], file: KeysFile) -> None:
    """Remove a key. A running gateway refuses it at once; requests under way finish."""
    from server.keys import revoke_key

    with user_errors():
        revoke_key(file, name)
    print(f"{name} is revoked")
