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


@app.command(cls=ConfiguredCommand, context_settings=_FREE, options_metavar="DIR [FLAGS]")
def plan(
    ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show the memory that a model needs with serve's flags, whether it fits, and how to split it over GPUs."""
    from server.config import load_config
    from server.plan import plan_for

    with _user_errors():
        planned = plan_for(load_config(_model_first(ctx.args)))
    print(json.dumps(planned.as_dict(), indent=2, ensure_ascii=False) if as_json else planned.as_text())
    raise typer.Exit(0 if planned.plan.fits else 2)


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


class ScaleMethod(str, Enum):
    """How block scales are chosen (quant/methods/scales.py)."""

    MAXABS = "maxabs"
    MSE = "mse"
    FOUROSIX = "fourosix"
    QUASAR = "quasar"


class GroupSize(str, Enum):
    """Elements that share a block scale."""

    SIXTEEN = "16"
    THIRTY_TWO = "32"


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Model directory with 16- or 32-bit weights.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    method: Annotated[ScaleMethod, typer.Option(help="How block scales are chosen.")] = ScaleMethod.MSE,
    compensate: Annotated[
        bool, typer.Option("--compensate", help="Round column by column, later ones making up for errors (GPTQ).")
    ] = False,
    calibration_text: Annotated[
        Path | None, typer.Option(help="Text for quasar and --compensate. [default: Python's library]")
    ] = None,
    calibration_windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of 512 tokens to calibrate on. [default: 8]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Picks the windows. [default: 0]")] = None,
    group_size: Annotated[GroupSize, typer.Option(help="Elements that share a scale.")] = GroupSize.SIXTEEN,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to keep as it is: a name, or re:PATTERN. Repeatable; replaces the default list."),
    ] = None,
) -> None:
    """Quantize a model directory to QUASAR-NVFP4."""
    from quant import calibration_text as texts
    from quant.calibrate import CalibrationSettings
    from quant.quantize import Method, quantize_checkpoint
    from quant.selection import DEFAULT_IGNORE

    with _user_errors(), _progress() as on_progress:
        chosen = {"windows": calibration_windows, "seed": seed}
        given = {name: value for name, value in chosen.items() if value is not None}
        calibration = None
        if given or calibration_text is not None:
            calibration = CalibrationSettings(texts.calibration_text(calibration_text), **given)
        report = quantize_checkpoint(
            source,
            destination,
            method=Method(method.value, compensate),
            calibration=calibration,
            group_size=int(group_size.value),
            ignore=DEFAULT_IGNORE if ignore is None else tuple(ignore),
            on_progress=on_progress,
        )
    print(
        f"{destination}: {len(report.quantized)} linear layers in NVFP4, {len(report.kept)} tensors kept; "
        f"{report.source_bytes / 1e6:.0f} MB became {report.output_bytes / 1e6:.0f} MB"
    )


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Leave the weights unread: headers, sizes and configs only.")
    ] = False,
    manifest: Annotated[
        bool, typer.Option("--write-manifest", help="Write SHA256SUMS anew, if nothing is wrong with the model.")
    ] = False,
) -> None:
    """Find what is wrong with a model directory: shards, headers, values, sha256, config, tensor-parallel sizes."""
    from quant.verify import verify as find_out
    from server.model_text import verification_text

    if headers and manifest:
        raise typer.BadParameter("--headers and --write-manifest exclude each other: digests need every byte")
    with _user_errors(), _progress() as on_progress:
        report = find_out(
            directory,
            "headers" if headers else "full",
            manifest="write" if manifest else "check",
            on_progress=on_progress,
        )
    print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if as_json else verification_text(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model directory holds: format, sizes by kind, layers, how it can be split over GPUs."""
    from quant.inspect import inspect_model
    from server.model_text import summary_text

    with _user_errors():
        summary = inspect_model(directory)
    print(json.dumps(summary.as_dict(), indent=2, ensure_ascii=False) if as_json else summary_text(summary))


@app.command()
def version() -> None:
    """Print the versions of voltserve, its engine and torch."""
    from importlib.metadata import version as version_of

    print(" ".join(f"{name} {version_of(name)}" for name in ("voltserve", "vllm", "torch")))


def _model_first(arguments: list[str]) -> list[str]:
    """`DIR [FLAGS]` as `--model DIR [FLAGS]`."""
    return ["--model", *arguments] if arguments and not arguments[0].startswith("-") else arguments


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
