"""The command line: long, as all commands are declared in one place.

Commands import what they need when they run, so that `voltserve --help` answers at once.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
keys_app = typer.Typer(help="API keys of the gateway (serve --keys-file).", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


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
    from server.engines import load_configs
    from server.serve import serve as run

    with _user_errors():
        code = run(load_configs(ctx.args))
    raise typer.Exit(code)


@app.command(cls=ConfiguredCommand, context_settings=_FREE, options_metavar="--model DIR [FLAGS]")
def explain(
    ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show what serve would do with the same flags, and why, without starting anything."""
    from server.engines import load_configs
    from server.explain import as_text
    from server.explain import explain as find_out

    with _user_errors():
        explained = [find_out(config) for config in load_configs(ctx.args)]
    if as_json:
        print(json.dumps(explained if len(explained) > 1 else explained[0], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(as_text(one) for one in explained))
    raise typer.Exit(2 if any(one["problem"] for one in explained) else 0)


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


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Model directory whose disk is measured.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    start_timeout: Annotated[float, typer.Option(help="Seconds in which the engine must be ready.")] = 900,
    quick: Annotated[bool, typer.Option(help="Leave out what is tried on the GPUs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine this machine for what stops or slows an engine: GPUs, links, memory, limits, disk."""
    from server.doctor import as_text, examine

    with _user_errors():
        findings = examine(model, host, port, start_timeout, quick=quick)
    report = {"findings": [finding.as_dict() for finding in findings]}
    print(json.dumps(report, indent=2, ensure_ascii=False) if as_json else as_text(findings))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


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


KeysFile = Annotated[
    Path, typer.Option("--file", metavar="FILE", envvar="VOLTSERVE_KEYS_FILE", help="File of keys.", dir_okay=False)
]


@keys_app.command("add")
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

    with _user_errors():
        print(add_key(file, name, requests_per_minute, max_concurrent))


@keys_app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys' names, dates and limits."""
    from server.keys import read_keys

    with _user_errors():
        keys = read_keys(file)
    for key in keys:
        limits = {"requests a minute": key.requests_per_minute, "at once": key.max_concurrent}
        told = "; ".join(
            f"{what}: {'as serve has it' if value is None else value or 'no limit'}" for what, value in limits.items()
        )
        print(f"{key.name}  {key.created:%Y-%m-%d}  {told}")


@keys_app.command("revoke")
def keys_revoke(name: Annotated[str, typer.Argument(help="Name of the key.")], file: KeysFile) -> None:
    """Remove a key. A running gateway refuses it at once; requests under way finish."""
    from server.keys import revoke_key

    with _user_errors():
        revoke_key(file, name)
    print(f"{name} is revoked")


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
        int | None, typer.Option(min=1, help="Windows of 512 tokens to calibrate on. [default: 16]")
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


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Model directory, or a server's URL without /v1.")],
    source: Annotated[Path | None, typer.Option(help="The 16-bit model it was made from, to compare with.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on. [default: Python's language reference]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text.")] = 4096,
    window: Annotated[int, typer.Option(min=16, help="Tokens of context, half of them overlapping.")] = 512,
    long_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each long output.")] = 256,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure this alone: text, questions or long. Repeatable.")
    ] = None,
    w4a4: Annotated[bool, typer.Option("--w4a4", help="Round activations to 4 bits too, as W4A4 engines do.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None,
) -> None:
    """Measure a model: perplexity, KL divergence from its 16-bit source, questions, long outputs."""
    from quant.calibration_text import evaluation_text
    from quant.evaluate import report as pages
    from quant.evaluate.run import PARTS, EvalSettings, evaluate_directory, evaluate_server
    from quant.evaluate.server import ServerModel

    for part in only or ():
        if part not in PARTS:
            raise typer.BadParameter(f"--only: expected one of {', '.join(PARTS)}, got {part}")
    is_server = target.startswith(("http://", "https://"))
    if is_server and source is not None:
        raise typer.BadParameter("--source needs a model directory: a server does not return whole distributions")
    with _user_errors(), _progress() as on_progress:
        settings = EvalSettings(
            evaluation_text(text),
            tuple(only) if only else PARTS,
            tokens=tokens,
            window=window,
            long_tokens=long_tokens,
            w4a4=w4a4,
        )
        if is_server:
            server = ServerModel(target.rstrip("/"), os.environ.get("VOLTSERVE_API_KEY", ""))
            report = evaluate_server(server, settings, on_progress)
        else:
            report = evaluate_directory(Path(target), source, settings, on_progress)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(pages.as_html(report), encoding="utf-8")
    print(pages.as_text(report))


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


class ModelFormat(str, Enum):
    """What `convert` writes."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    QUASARNVFP4 = "quasarnvfp4"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="NVFP4 model directory, or GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    model_format: Annotated[ModelFormat, typer.Option("--format", help="Format to write.")],
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Round global scales that the format cannot hold, rather than refuse.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert an NVFP4 model directory to another format, without changing a value."""
    from quant.convert import convert_checkpoint

    with _user_errors(), _progress() as on_progress:
        report = convert_checkpoint(source, destination, model_format.value, nearest=nearest, on_progress=on_progress)
    if as_json:
        print(json.dumps({**asdict(report), "rounded": list(report.rounded)}, indent=2))
        return
    exactly = f"{len(report.rounded)} scales rounded" if report.rounded else "every value kept"
    print(f"{destination}: {report.linears} linears from {report.source_format} to {model_format.value}, {exactly}")


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
