"""`voltserve keys`: the gateway's API keys."""

import json
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.common import group, user_errors
from server.environment import KEYS_FILE, USAGE_FILE

if TYPE_CHECKING:
    from server.keys import ApiKey

app = group("API keys of the gateway (serve --keys-file).")

KeysFile = Annotated[
    Path, typer.Option("--file", metavar="FILE", envvar=KEYS_FILE, help="File of keys.", dir_okay=False)
]


# The limits of a key, as `add` and `change` take them.
RequestsPerMinute = Annotated[int | None, typer.Option(min=0, help="Limit of this key, instead of serve's; 0: none.")]
MaxConcurrent = Annotated[
    int | None, typer.Option(min=0, help="Requests of this key at once, instead of serve's; 0: no limit.")
]
Expires = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Last day on which it is valid, in UTC.")]
Models = Annotated[
    list[str] | None, typer.Option(help="A model name that it may ask for; may be repeated. Default: all.")
]
TokensPerDay = Annotated[
    int | None, typer.Option(min=1, help="Tokens of prompts and answers a day, from 00:00 UTC on.")
]


class Limit(str, Enum):
    """The limits by the names of their flags."""

    REQUESTS_PER_MINUTE = "requests-per-minute"
    MAX_CONCURRENT = "max-concurrent"
    EXPIRES = "expires"
    MODELS = "models"
    TOKENS_PER_DAY = "tokens-per-day"

    @property
    def field(self) -> str:
        """Its name in the file of keys."""
        return self.value.replace("-", "_")


@app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whom the key is for; the log shows this name.")],
    file: KeysFile,
    requests_per_minute: RequestsPerMinute = None,
    max_concurrent: MaxConcurrent = None,
    expires: Expires = None,
    models: Models = None,
    tokens_per_day: TokensPerDay = None,
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


@app.command("change")
def keys_change(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    file: KeysFile,
    requests_per_minute: RequestsPerMinute = None,
    max_concurrent: MaxConcurrent = None,
    expires: Expires = None,
    models: Models = None,
    tokens_per_day: TokensPerDay = None,
    clear: Annotated[
        list[Limit] | None, typer.Option(help="A limit to take away: this key then has serve's, or none. Repeatable.")
    ] = None,
) -> None:
    """Change limits of a key; others stay, and so does the key. A running gateway takes them at once.

    Tokens already used today count against a new budget.
    """
    from server.errors import ConfigError
    from server.keys import change_key

    values = {
        Limit.REQUESTS_PER_MINUTE: requests_per_minute,
        Limit.MAX_CONCURRENT: max_concurrent,
        Limit.EXPIRES: expires and expires.date(),
        Limit.MODELS: models or None,
        Limit.TOKENS_PER_DAY: tokens_per_day,
    }
    given = {limit: value for limit, value in values.items() if value is not None}
    with user_errors():
        if both := [limit.value for limit in clear or () if limit in given]:
            raise ConfigError(f"--{both[0]} and --clear {both[0]} contradict each other; give one")
        if not given and not clear:
            flags = ", ".join(f"--{limit.value}" for limit in Limit)
            raise ConfigError(f"nothing to change: give {flags} or --clear LIMIT")
        before, now = change_key(
            file,
            name,
            **{limit.field: value for limit, value in given.items()},
            **{one.field: None for one in clear or ()},
        )
    if before == now:
        print(f"{_described(now)}  (as it was)")
    else:
        print(f"was: {_described(before)}\nnow: {_described(now)}")


def _described(key: "ApiKey") -> str:
    """A line with the key's name, date and limits."""
    of_requests = {"requests per minute": key.requests_per_minute, "at once": key.max_concurrent}
    limits = "; ".join(
        f"{what}: {'as serve has it' if value is None else value or 'no limit'}" for what, value in of_requests.items()
    )
    expiry = f"{key.expires} at its end" if key.expires else "never"
    models = ", ".join(key.models) if key.models else "all"
    budget = key.tokens_per_day or "no limit"
    return (
        f"{key.name}  {key.created:%Y-%m-%d}  {limits}; expires: {expiry}; models: {models}; tokens per day: {budget}"
    )


@app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys' names, dates and limits."""
    from server.keys import read_keys

    with user_errors():
        keys = read_keys(file)
    for key in keys:
        print(_described(key))


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
