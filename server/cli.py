"""The command line. Commands import what they need when they run, so that `voltserve --help` answers at once."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from quant.progress import OnProgress

app = typer.Typer(
    name="voltserve",
    help="Serves 4-bit NVFP4 models behind an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Model directories.", no_args_is_help=True)
app.add_typer(model_app, name="model")


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
_FREE = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command(cls=ConfiguredCommand, context_settings=_FREE, options_metavar="--model DIR [FLAGS]")
def serve(ctx: typer.Context) -> None:
    """Serve a model: start the engine, watch it, and answer clients."""
    from server.config import load_config
    from server.serve import serve as run

    with _user_errors():
        code = run(load_config(ctx.args))
    raise typer.Exit(code)


@app.command(cls=ConfiguredCommand, context_settings=_FREE, options_metavar="--model DIR [FLAGS]")
def explain(
    ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show what serve would do with the same flags, and why, without starting anything."""
    from server.config import load_config
    from server.explain import as_text
    from server.explain import explain as find_out

    with _user_errors():
        explained = find_out(load_config(ctx.args))
    print(json.dumps(explained, indent=2, ensure_ascii=False) if as_json else as_text(explained))
    raise typer.Exit(2 if explained["problem"] else 0)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="Name of a known model, such as smollm2.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
) -> None:
    """Fetch a small model and make a model directory of it."""
    from quant.models import fetch_model

    with _user_errors(), _progress() as on_progress:
        fetch_model(name, directory, on_progress)
    print(f"{name} is in {directory}")


class Policy(str, Enum):
    """How block scales are chosen."""

    MAXABS = "maxabs"
    MSE = "mse"


class GroupSize(str, Enum):
    """Elements that share a block scale."""

    SIXTEEN = "16"
    THIRTY_TWO = "32"


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Model directory with 16- or 32-bit weights.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    policy: Annotated[Policy, typer.Option(help="How block scales are chosen.")] = Policy.MSE,
    group_size: Annotated[GroupSize, typer.Option(help="Elements that share a scale.")] = GroupSize.SIXTEEN,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to keep as it is: a name, or re:PATTERN. Repeatable; replaces the default list."),
    ] = None,
) -> None:
    """Quantize a model directory to QUASAR-NVFP4."""
    from quant.quantize import quantize_checkpoint
    from quant.selection import DEFAULT_IGNORE

    with _user_errors(), _progress() as on_progress:
        report = quantize_checkpoint(
            source,
            destination,
            policy=policy.value,
            group_size=int(group_size.value),
            ignore=DEFAULT_IGNORE if ignore is None else tuple(ignore),
            on_progress=on_progress,
        )
    print(
        f"{destination}: {len(report.quantized)} linear layers in NVFP4, {len(report.kept)} tensors kept; "
        f"{report.source_bytes / 1e6:.0f} MB became {report.output_bytes / 1e6:.0f} MB"
    )


@app.command()
def version() -> None:
    """Print the versions of voltserve, its engine and torch."""
    from importlib.metadata import version as version_of

    print(" ".join(f"{name} {version_of(name)}" for name in ("voltserve", "vllm", "torch")))


@contextmanager
def _user_errors() -> Iterator[None]:
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
def _progress() -> Iterator["OnProgress"]:
    """Shows long work on stderr: a bar on a terminal, log lines otherwise."""
    from server import logs
    from server.terminal import LoggedWork, WorkBar

    logs.configure("info", "text")
    with WorkBar() if sys.stderr.isatty() else LoggedWork() as on_progress:
        yield on_progress


def main(arguments: list[str] | None = None) -> None:
    """The console script `voltserve`."""
    app(args=arguments, prog_name="voltserve")
