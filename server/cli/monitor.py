"""`voltserve monitor`: a running service, live."""

import json
import sys
import time
from typing import Annotated

import typer

from server.cli.common import group, user_errors

app = group()


@app.command()
def monitor(
    url: Annotated[str, typer.Option(help="The service, without /v1.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks to take; 0: until Ctrl-C.")] = 0,
) -> None:
    """Watch a service and this machine's GPUs: tokens per second, queue, cache, GPU memory, temperature, throttling.

    Where the output is no terminal, each look is one JSON object in a line. Works without a GPU.
    """
    from rich.console import Console
    from rich.live import Live

    from server.monitor.figures import History, figures
    from server.monitor.reading import GpuReader, Reading, read
    from server.monitor.view import picture

    url = url.rstrip("/").removesuffix("/v1")
    history, gpus = History(), GpuReader()
    before: Reading | None = None
    live = Live(console=Console(), auto_refresh=False, screen=count == 0) if sys.stdout.isatty() else None
    looks = 0
    try:
        with user_errors():
            if live is not None:
                live.start()
            while True:
                now = read(url, gpus)
                found = figures(before, now)
                history.add(found.generated)
                if live is None:
                    print(json.dumps(found.as_dict(), ensure_ascii=False), flush=True)
                else:
                    live.update(picture(found, history, url), refresh=True)
                before = now
                looks += 1
                if looks == count:
                    break
                time.sleep(interval)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()
