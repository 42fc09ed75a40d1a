"""Shared by the commands: serve's flags, errors as one message, progress of long work, results as JSON."""

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from quant.progress import OnProgress

# Of commands that ask a hub.
Endpoint = Annotated[
    str, typer.Option(metavar="URL", help="The hub, or its mirror. [default: HF_ENDPOINT or MODELSCOPE_ENDPOINT]")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with a token, for gated models. [default: HF_TOKEN or MODELSCOPE_API_TOKEN]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def group(about: str = "") -> typer.Typer:
    """An application that holds commands of one kind; without a name of its own they are `voltserve`'s."""
    return typer.Typer(
        help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )


# The sections of serve's help. A test finds a setting that is missing here.
SETTINGS = {
    "Model and machine": ("model", "engines", "served-model-name", "preset", "memory-plan", "volta"),
    "Where it listens": ("host", "port", "cors-origins", "forwarded-allow-ips", "keys-file", "usage-file"),
    "Limits of clients": (
        *("requests-per-minute", "max-concurrent", "max-in-flight", "queue-size", "queue-timeout"),
        *("max-body-bytes", "body-timeout", "max-prompt-chars", "max-sequences"),
    ),
    "Watching the engine": (
        *("start-timeout", "heartbeat-timeout", "step-timeout", "hang-timeout", "drain-timeout", "stop-timeout"),
    ),
    "Log": ("log-level", "log-format"),
}


class ConfiguredCommand(TyperCommand):
    """A command whose flags `server.config.settings` parses; its help lists them from there."""

    engine_flags = True  # whether it takes those of engines, too
    logs = False  # whether --log-format is about its own output

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. For an unknown flag, an error names the command's own options before serve's."""
        from server.config.settings import all_flags
        from server.errors import ConfigError

        own = [name for parameter in self.params for name in parameter.opts]
        for token in ctx.args:
            name = token.partition("=")[0]
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
            if name.startswith("--") and near and name[2:] not in all_flags():
                with user_errors(ctx.args if self.logs else None):
                    raise ConfigError(f"unknown flag {name!r}; did you mean {near[0]}?")
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the settings."""
        from server.config.engines_file import OF_A_FILE
        from server.config.settings import Settings, variable_name

        fields = {name.replace("_", "-"): field for name, field in Settings.model_fields.items()}
        width = max(len(name) for name in fields) + 2
        for title, names in SETTINGS.items():
            rows = []
            for name in names:
                if not self.engine_flags and name in OF_A_FILE:
                    continue
                field = fields[name]
                default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
                shown = f" [{default}]" if not field.is_required() and default != "" else ""
                rows.append((f"--{name}".ljust(width), f"{field.description}{shown}"))
            with formatter.section(title):
                formatter.write_dl(rows)
        if not self.engine_flags:
            return
        formatter.write_paragraph()
        formatter.write_text(
            "Any flag of vLLM 0.28.0's server is passed on to the engine: --max-model-len 8192, --enforce-eager. "
            f"Each flag is also a variable: {variable_name('max-model-len')}=8192."
        )


class ServeCommand(ConfiguredCommand):
    """One that serves. Where its command line asks for a log of JSON, errors of that line are JSON, too."""

    logs = True

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """Parses the command line: `given` is the command's name and its arguments."""
        with _usage_errors(tuple(given[1]) if len(given) > 1 else tuple(more["args"])):
            return super().make_context(*given, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with _usage_errors(ctx.args):
            return super().invoke(ctx)


class GatewayCommand(ServeCommand):
    """One whose engines are configured in a file."""

    engine_flags = False


# Click does not parse these flags: they are vLLM's and ours, and a preset and the environment give them too.
FREE = {"ignore_unknown_options": True, "allow_extra_args": True}


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """Prints a result for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def user_errors(arguments: Sequence[str] | None = None) -> Iterator[None]:
    """Shows an error that the user can fix as one message, without a traceback.

    Args:
        arguments: the command line of a command that logs. Where it asks for JSON, all output from here on is JSON.
    """
    from quant.errors import QuantError
    from server import logs
    from server.errors import UserError

    as_json = arguments is not None and logs.asked_form(arguments) == "json"
    if as_json:
        logs.no_plain_lines()
    try:
        yield
    except (UserError, QuantError) as error:
        code = error.exit_code if isinstance(error, UserError) else 1
        if as_json:
            logs.error(str(error), exit_code=code)
        else:
            print(f"voltserve: {error}", file=sys.stderr)
        raise typer.Exit(code) from error


@contextmanager
def _usage_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Shows click's errors of a command line as `user_errors` shows ours, where it asks for JSON."""
    from server import logs

    try:
        yield
    except click.UsageError as error:
        if logs.asked_form(arguments) != "json":
            raise
        logs.no_plain_lines()
        logs.error(error.format_message(), exit_code=error.exit_code)
        raise typer.Exit(error.exit_code) from error


@contextmanager
def progress() -> Iterator["OnProgress"]:
    """Shows long work on stderr: a bar on a terminal, log lines otherwise."""
    from server import logs
    from server.run.terminal import LoggedWork, WorkBar

    logs.configure("info", "text")
    with WorkBar() if sys.stderr.isatty() else LoggedWork() as on_progress:
        yield on_progress
