"""`voltserve smoke`: does all of it work here?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import FREE, ConfiguredCommand, group, progress, user_errors

app = group()


@app.command(cls=ConfiguredCommand, context_settings=FREE, options_metavar="[--model DIR] [FLAGS]")
def smoke(
    ctx: typer.Context,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Your model, after the small one.")] = None,
    small: Annotated[
        Path, typer.Option(metavar="DIR", help="The small model, SmolLM2-135M in NVFP4; made where it is not there.")
    ] = Path("models/smollm2-nvfp4"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report here as a page.")] = None,
) -> None:
    """Go the whole way with a small model, then with yours: doctor, verify, plan, start, ask, metrics, stop.

    The model is asked in two languages and writes 300 tokens in each. Works without a GPU. The exit code is 1 where a
    step failed; warnings do not count. Other flags are serve's, for your model.
    """
    import tempfile

    from server.smoke import report
    from server.smoke.run import Smoke

    with user_errors(), progress() as on_progress, tempfile.TemporaryDirectory(prefix="voltserve-smoke-") as logs:
        test = Smoke(Path(logs), on_progress, lambda step: print(report.step_text(step), flush=True))
        test.look_at_machine(model or small)
        print(small)
        test.make_small_model(small)
        test.go_through(small, ())
        if model is not None:
            print(model)
            test.go_through(model, ctx.args)
    if json_file is not None:
        text = json.dumps(report.as_dict(test.steps), indent=2, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(report.as_html(test.steps), encoding="utf-8")
    print(report.verdict_text(test.steps))
    raise typer.Exit(1 if report.verdict_of(test.steps) == "error" else 0)
