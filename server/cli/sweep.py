"""`voltserve sweep`: which settings serve a model best on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import FREE, ConfiguredCommand, group, progress, user_errors

app = group()


@app.command(cls=ConfiguredCommand, context_settings=FREE, options_metavar="--model DIR --out DIR [FLAGS]")
def sweep(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results; a sweep there goes on.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V,V",
            help="An engine flag, or a variable such as OMP_NUM_THREADS, and its values. Repeatable; "
            "without it a small set for GPUs or for the CPU.",
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Users at once, one level of load each.")] = "1,8",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, exactly.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer, exactly.")] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests a level. [default: 4 a user]")] = None,
    least_user: Annotated[
        float, typer.Option(min=0, help="Tokens per second that each user of the best must get.")
    ] = 0,
    note: Annotated[str, typer.Option(help="A line for the page, such as what else the machine did.")] = "",
) -> None:
    """Restart the engine with each combination of settings under the same load; plot, and write the best as a preset.

    Points that `plan` says cannot fit are skipped; points that fail are kept with their diagnosis and not tried again.
    Stopped, it goes on where it was. Other flags are serve's.
    """
    from server.bench.load import parse_levels
    from server.bench.run import BenchSettings
    from server.config.settings import load_config
    from server.sweep.report import Sweeping

    with user_errors(), progress() as on_progress:
        settings = BenchSettings(input_len, output_len, parse_levels(concurrency, ""), requests)
        sweeping = Sweeping.of(tuple(ctx.args), load_config(ctx.args), tuple(vary or ()), settings, out, note)
        sweeping.run(on_progress)
        text, found = sweeping.conclude(least_user)
    print(text)
    raise typer.Exit(0 if found else 1)
