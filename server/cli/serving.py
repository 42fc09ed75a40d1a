"""Commands that start an engine, or say what starting one would do: serve, explain, plan, doctor."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.common import (
    FREE,
    AsJson,
    ConfiguredCommand,
    Endpoint,
    ServeCommand,
    TokenFile,
    group,
    print_json,
    user_errors,
)
from server.cli.found import model_directory

app = group()


@app.command(cls=ServeCommand, context_settings=FREE, options_metavar="--model DIR [FLAGS]")
def serve(ctx: typer.Context) -> None:
    """Serve a model: start the engine, watch it, and answer clients."""
    from server.config.engines_file import load_configs
    from server.run.serve import serve as run

    with user_errors(ctx.args):
        code = run(load_configs(ctx.args))
    raise typer.Exit(code)


@app.command(cls=ConfiguredCommand, context_settings=FREE, options_metavar="--model DIR [FLAGS]")
def explain(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show what serve would do with the same flags, and why, without starting anything."""
    from server.config.engines_file import load_configs
    from server.run.explain import as_text
    from server.run.explain import explain as find_out

    with user_errors():
        explained = [find_out(config) for config in load_configs(ctx.args)]
    if as_json:
        print_json(explained if len(explained) > 1 else explained[0])
    else:
        print("\n\n".join(as_text(one) for one in explained))
    raise typer.Exit(max(one["exit_code"] for one in explained))


class PlannedFormat(str, Enum):
    """What `plan --as` takes."""

    NVFP4 = "nvfp4"


@app.command(cls=ConfiguredCommand, context_settings=FREE, options_metavar="DIR [FLAGS]")
def plan(
    ctx: typer.Context,
    as_json: AsJson = False,
    as_format: Annotated[
        PlannedFormat | None,
        typer.Option("--as", help="Plan a 16-bit model as it will be once `voltserve quantize` has made it this."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG", help="Compare with what the engine of this log of serve, with the same flags, said."
        ),
    ] = None,
    endpoint: Endpoint = "",
    token_file: TokenFile = None,
) -> None:
    """Show the memory that a model needs with serve's flags, whether it fits, and how to split it over GPUs.

    Of a model on a hub (hf:OWNER/NAME, modelscope:OWNER/NAME, a folder's URL) configs and headers are read.
    """
    from quant.errors import QuantError
    from server.config.settings import load_config
    from server.errors import ModelRefusedError
    from server.plan import plan_for
    from server.run import servable

    model, *flags = ctx.args or [""]
    if model.startswith("-") or not ctx.args:
        model, flags = "", ctx.args
    with user_errors(), model_directory(model, endpoint, token_file) as found:
        config = load_config([*(["--model", str(found.directory)] if model else []), *flags])
        if as_format is None:
            servable.check(config)
        try:
            planned = plan_for(config, quantized=as_format is not None)
        except QuantError as error:  # its files; as serve's checks say it
            raise ModelRefusedError(str(error)) from error
        if against is not None:
            raise typer.Exit(_compare(planned.as_dict(), against, as_json=as_json))
        if as_json:
            print_json(found.json(planned.as_dict()))
        else:
            print(found.text(planned.as_text()))
    raise typer.Exit(0 if planned.plan.fits else 2)


def _compare(plan: dict[str, Any], log: Path, *, as_json: bool) -> int:
    """Prints a plan beside what the log's engine reported. 0 where they agree."""
    from server.errors import UserError
    from server.plan.agreement import agreement
    from server.plan.report import agreement_text

    try:
        rows = agreement(plan, log.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"--against: {log}: {error.strerror}") from error
    if not rows:
        message = f"--against: {log}: expected the log of serve or of vLLM, got no line about weights or cache"
        raise UserError(f"{message}; keep the log of a start that became ready")
    if as_json:
        print_json([row.as_dict() for row in rows])
    else:
        print(agreement_text(rows))
    return 0 if all(row.agrees for row in rows) else 1


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Model directory whose disk is measured.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    start_timeout: Annotated[float, typer.Option(help="Seconds in which the engine must be ready.")] = 900,
    quick: Annotated[bool, typer.Option(help="Leave out what is tried on the GPUs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine for what stops or slows an engine: GPUs, links, memory, limits, disk."""
    from server.doctor import as_text, examine

    with user_errors():
        findings = examine(model, host, port, start_timeout, quick=quick)
    report = {"findings": [finding.as_dict() for finding in findings]}
    if as_json:
        print_json(report)
    else:
        print(as_text(findings))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)
