"""The command line `voltserve`: one module a group of commands.

Commands import what they need when they run, so that `voltserve --help` answers at once.
"""

import click
import typer
from typer.core import TyperGroup

from server.cli import bench, cluster, evaluation, keys, models, monitor, serving, smoke, sweep, version

# The sections of the help. A test finds a command that is missing here.
SECTIONS = {
    "Serving": ("serve", "explain", "plan", "doctor", "monitor", "keys"),
    "Several machines": ("deploy", "cluster"),
    "Models": ("advise", "model", "quantize", "convert", "verify", "inspect"),
    "Measuring": ("smoke", "eval", "bench", "sweep"),
    "About": ("version",),
}


class SectionedGroup(TyperGroup):
    """Lists its commands by section, each with its whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections."""
        width = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit=1000)) for name in names]
                )


app = typer.Typer(
    name="voltserve",
    cls=SectionedGroup,
    help="Serves 4-bit NVFP4 models behind an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for commands in (serving, models, evaluation, bench, sweep, smoke, monitor, version):
    app.add_typer(commands.app)
app.add_typer(cluster.deploying)
app.add_typer(keys.app, name="keys")
app.add_typer(cluster.app, name="cluster")


def main(arguments: list[str] | None = None) -> None:
    """The console script `voltserve`."""
    app(args=arguments, prog_name="voltserve")
