"""`voltserve bench`: load on a server."""

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from server.cli.common import group, progress, user_errors
from server.environment import API_KEY

app = group()


@app.command()
def bench(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for bench.json, requests.jsonl and index.html.")],
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    serve: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Serve this model meanwhile, instead of a server at --url.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Users at once, one level each; a user sends once its last request is answered. "
            "[default: 1,8,16,32, or with --rate none]"
        ),
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Requests per second that arrive at random (Poisson), one level each.")
    ] = "",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, exactly.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly.")] = 128,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests a level. [default: 4 a user; at a rate, 30 s of them]")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one request may take.")] = 600,
    model: Annotated[str, typer.Option(help="Model to ask for. [default: the server's first]")] = "",
    seed: Annotated[int, typer.Option(help="Picks the prompts and the arrivals.")] = 0,
    note: Annotated[str, typer.Option(help="A line for the page, such as what else the machine did.")] = "",
) -> None:
    """Put load on a server and measure it: tokens per second, TTFT, time between tokens, errors; JSON and a page.

    The key, where the server wants one, is VOLTSERVE_API_KEY.
    """
    from server.bench.load import parse_levels
    from server.bench.prompts import find_target
    from server.bench.report import Report, as_text
    from server.bench.run import BenchSettings, LevelResult, run_bench
    from server.run.child import running

    with user_errors(), progress() as on_progress, ExitStack() as stack:
        levels = parse_levels(("" if rate else "1,8,16,32") if concurrency is None else concurrency, rate)
        settings = BenchSettings(input_len, output_len, levels, requests, seed, limit)
        if serve is not None:
            log = Path(stack.enter_context(TemporaryDirectory(prefix="voltserve-bench-"))) / "serve.log"
            service = stack.enter_context(running(["--model", str(serve)], log))
            service.wait_until_ready("start", on_progress)
            url = service.url
        target = find_target(url, os.environ.get(API_KEY, ""), model)
        report = Report.of(target, settings, note)
        results: list[LevelResult] = []

        def keep(result: LevelResult) -> None:
            results.append(result)
            report.write(out, results)

        run_bench(target, settings, on_progress, keep)
    print(as_text(results))
    print(f"{out / 'index.html'}")
    raise typer.Exit(1 if any(outcome.error for result in results for outcome in result.outcomes) else 0)
