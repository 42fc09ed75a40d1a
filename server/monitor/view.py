"""The figures as a picture of the terminal (rich)."""

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from server.monitor.figures import Figures, History
from server.monitor.reading import GpuReading
from server.units import GIB

# NVIDIA's V100 slows down at 83 to 87 °C; the reference document says 85.
WARM, HOT = 80, 85
FULL = 0.95  # of the memory or the cache
BAR = 24
_STATES = {
    "ready": "bold green",
    "stopped": "bold dim",
    "degraded": "bold yellow",
    "failed": "bold red",
    "no answer": "bold red",
}


def picture(figures: Figures, history: History, url: str) -> Group:
    """All of it, for one look."""
    return Group(
        Panel(_service(figures, url), title="service", title_align="left", border_style="dim"),
        Panel(_load(figures, history), title="load", title_align="left", border_style="dim"),
        Panel(_gpus(figures), title="GPUs", title_align="left", border_style="dim"),
        Text("Ctrl-C ends", style="dim"),
    )


def _service(figures: Figures, url: str) -> Text:
    text = Text()
    text.append(figures.state, _STATES.get(figures.state, "bold"))
    text.append(f"  {url}  {figures.model}", "default")
    if figures.preset:
        text.append(f"  preset {figures.preset}", "dim")
    if figures.restarts:
        text.append(f"  {figures.restarts} restarts", "yellow")
    if figures.progress:
        done, total = figures.progress.get("done"), figures.progress.get("total")
        share = f" {done / total:.0%}" if done is not None and total else ""
        text.append(f"\n{figures.progress.get('phase')}{share}, {figures.progress.get('elapsed')} s", "cyan")
    for engine in figures.engines:
        text.append(f"\n{engine}", "default")
    for warning in figures.warnings:
        text.append(f"\n{warning}", "yellow")
    if figures.problem:
        text.append(f"\n{figures.problem}", "red")
    elif figures.state not in {"ready", "stopped"} and figures.reason:
        text.append(f"\n{figures.reason}", "yellow")
    return text


def _load(figures: Figures, history: History) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True, overflow="crop")
    rows.add_row("tokens per second", _number(figures.generated), Text(history.curve(), "green"))
    rows.add_row("prompt tokens per second", _number(figures.prompt), "")
    first = "" if figures.first_token is None else f"{figures.first_token * 1e3:.0f} ms"
    rows.add_row("to the first token", first, "")
    rows.add_row("requests running", str(figures.running), "")
    waiting = Text(str(figures.waiting + figures.queued), "yellow" if figures.waiting + figures.queued else "default")
    rows.add_row("waiting", waiting, Text(f"{figures.waiting} in the engine, {figures.queued} in the queue", "dim"))
    rows.add_row("key/value cache", f"{figures.cache:.0%}", _bar(figures.cache))
    counts = [
        f"{count} {what}" for count, what in ((figures.refused, "refused"), (figures.preempted, "preempted")) if count
    ]
    if counts:
        rows.add_row("since the start", "", Text(", ".join(counts), "yellow"))
    return rows


def _gpus(figures: Figures) -> Table | Text:
    if not figures.gpus:
        return Text(f"none: {figures.gpus_problem}", "dim")
    rows = Table.grid(padding=(0, 2))
    for gpu in figures.gpus:
        used = gpu.memory_used / gpu.memory_total
        memory = f"{gpu.memory_used / GIB:.1f} / {gpu.memory_total / GIB:.1f} GiB"
        rows.add_row(str(gpu.index), gpu.name, _bar(used), memory, _temperature(gpu), _throttling(gpu))
    if figures.gpus_problem:
        rows.add_row("", Text(figures.gpus_problem, "bold red"))
    return rows


def _temperature(gpu: GpuReading) -> Text:
    if gpu.temperature is None:
        return Text("")
    style = "bold red" if gpu.temperature >= HOT else "yellow" if gpu.temperature >= WARM else "default"
    return Text(f"{gpu.temperature} °C", style)


def _throttling(gpu: GpuReading) -> Text:
    return Text(f"slowed: {', '.join(gpu.throttle)}", "bold red") if gpu.throttle else Text("full speed", "dim")


def _bar(share: float) -> ProgressBar:
    colour = "red" if share > FULL else "cyan"
    return ProgressBar(total=1.0, completed=min(1.0, share), width=BAR, complete_style=colour, finished_style=colour)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
