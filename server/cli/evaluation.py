"""`voltserve eval`: how good a model is."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import group, progress, user_errors
from server.environment import API_KEY

app = group()


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Model directory, or a server's URL without /v1.")],
    source: Annotated[Path | None, typer.Option(help="The 16-bit model it was made from, to compare with.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text or JSONL to measure on. [default: Python's language reference]")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of the text; a server's last window may add some.")
    ] = 4096,
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
    with user_errors(), progress() as on_progress:
        settings = EvalSettings(
            evaluation_text(text, None if is_server else Path(target)),
            tuple(only) if only else PARTS,
            tokens=tokens,
            window=window,
            long_tokens=long_tokens,
            w4a4=w4a4,
        )
        if is_server:
            server = ServerModel(target.rstrip("/"), os.environ.get(API_KEY, ""))
            report = evaluate_server(server, settings, on_progress)
        else:
            report = evaluate_directory(Path(target), source, settings, on_progress)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(pages.as_html(report), encoding="utf-8")
    print(pages.as_text(report))
