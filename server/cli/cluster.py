"""`voltserve deploy` and `voltserve cluster`: several machines, through Ray Serve."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli.common import FREE, AsJson, GatewayCommand, group, print_json, user_errors

deploying = group()
app = group("What runs on the machines of a cluster.")

ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="Models and replicas (docs/cluster.md).")]


@deploying.command(cls=GatewayCommand, context_settings=FREE, options_metavar="--config FILE [FLAGS]")
def deploy(
    ctx: typer.Context,
    config: ConfigFile,
    update_only: Annotated[
        bool, typer.Option("--no-gateway", help="Update what runs, and end once all replicas are up.")
    ] = False,
    gateway_only: Annotated[bool, typer.Option("--gateway-only", help="Be a gateway to what runs already.")] = False,
) -> None:
    """Serve models on several machines: have Ray run their replicas, and be their gateway.

    Run it on a machine that is a node of the cluster (`ray start`). Ctrl-C ends the gateway; the models run on.
    """
    from server.cluster.deploy import Wanted
    from server.cluster.deploy import deploy as run

    if update_only and gateway_only:
        raise typer.BadParameter("--no-gateway and --gateway-only exclude each other")
    with user_errors(ctx.args):
        code = run(config, ctx.args, Wanted(update=not gateway_only, gateway=not update_only))
    raise typer.Exit(code)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show the nodes, and each model's replicas."""
    from server.cluster.manage import ask, status_text

    with user_errors():
        found = ask("status")
    if as_json:
        print_json(found)
    else:
        print(status_text(found))


@app.command()
def stop() -> None:
    """Stop all models, once their requests have finished."""
    from server.cluster.manage import ask

    with user_errors():
        stopped = ask("stop")["stopped"]
    print(f"stopping {', '.join(stopped)}" if stopped else "nothing of voltserve's runs in this cluster")


@app.command()
def render(config: ConfigFile) -> None:
    """Print what KubeRay's RayService wants as `serveConfigV2`."""
    import yaml

    from server.cluster.file import read_cluster
    from server.cluster.layout import serve_config

    with user_errors():
        print(yaml.safe_dump(serve_config(read_cluster(config)), sort_keys=False, allow_unicode=True), end="")
