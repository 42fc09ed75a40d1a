"""What the commands share: serve's flags, errors as one message, progress of long work, results as JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from quant.progress import OnProgress

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def group(about: str = "") -> typer.Typer:
    """An application that holds commands of one kind; without a name of its own they are `voltserve`'s."""
    return typer.Typer(
        help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )


class ConfiguredCommand(TyperCommand):
    """A command whose flags are those of `server.config`, which parses them; its help lists them from there."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the settings."""
        from server.config import Settings, variable_name

        rows = []
        for field_name, field in Settings.model_fields.items():
            name = field_name.replace("_", "-")
            default = f" [{field.default}]" if not field.is_required() and field.default not in ("", ()) else ""
            rows.append((f"--{name}", f"{field.description}{default}"))
        with formatter.section("Settings"):
            formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text(
            "Any flag of vLLM 0.19.1's server is passed on to the engine: --max-model-len 8192, --enforce-eager. "
            f"Each flag is also a variable: {variable_name('max-model-len')}=8192."
        )


# The flags are not Click's to parse: they are vLLM's and ours, and a preset and the environment give them too.
FREE = {"ignore_unknown_options": True, "allow_extra_args": True}


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Prints a result for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def user_errors() -> Iterator[None]:
    """Shows what the user can act on as one message, without a traceback."""
    from quant.errors import QuantError
    from server.errors import UserError

    try:
        yield
    except UserError as error:
        print(f"voltserve: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except QuantError as error:
        print(f"voltserve: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@contextmanager
def progress() -> Iterator["OnProgress"]:
    """Shows long work on stderr: a bar on a terminal, log lines otherwise."""
    from server import logs
    from server.terminal import LoggedWork, WorkBar

    logs.configure("info", "text")
    with WorkBar() if sys.stderr.isatty() else LoggedWork() as on_progress:
        yield on_progress
