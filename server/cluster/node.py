"""One replica: `python -m server.cluster.node HOST`, started on its machine by the replica's actor (on_ray/replica.py).

It is `voltserve serve` with a relay instead of the gateway.

    stdin    one line with the replica's arguments as JSON; its end means that the actor is gone, and ends this process
    stdout   lines of JSON for the actor: address, each state, the number of gateways' requests, finally the failure
    SIGTERM  requests in flight finish, then the process ends
"""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import uvloop

from server import logs
from server.cluster.link import PULSE, config_message, gpu_messages, status_message
from server.cluster.relay import Relay
from server.config.render import engine_socket, overridden, render_launch
from server.config.settings import Config, load_config
from server.diagnosis.catalogue import UNKNOWN_EXIT_CODE
from server.errors import UserError
from server.gateway.gpu_metrics import GpuMeter
from server.run import preflight
from server.run.lifetime import Signals, allow_many_files, first_done, runtime_folder
from server.supervisor import Status, Supervisor
from server.supervisor.probe import engine_client

log = structlog.get_logger("voltserve.replica")


def main() -> None:
    """Runs until the actor is gone, SIGTERM arrives or the engine is given up."""
    logs.configure("info", "text")
    host = sys.argv[1]
    try:
        code = uvloop.run(_run(host, json.loads(sys.stdin.readline())))
    except UserError as error:
        log.error("this machine cannot run the replica", error=str(error))  # noqa: TRY400 — the user's to fix
        say(error=str(error))
        code = error.exit_code
    raise SystemExit(code)


def say(**message: Any) -> None:
    """Sends the actor a message. The actor may be gone."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(message), flush=True)


def config_of(arguments: Mapping[str, Any]) -> Config:
    """The configuration of the replica with these arguments (server/cluster/file.py), on this machine.

    Raises:
        UserError: as `load_config`.
    """
    layer = (f"cluster.yaml model {arguments['name']}", arguments["flags"])
    return load_config([], last=layer).model_copy(update={"name": arguments["name"]})


async def _run(host: str, arguments: Mapping[str, Any]) -> int:
    if arguments["nodes"] > 1:  # Ray gave the actor no GPU; the engine asks Ray for them, and they are planned here
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(arguments["env"])
    config = config_of(arguments)
    logs.configure(config.log_level, config.log_format)
    decisions = (*config.decisions, *overridden(config), *preflight.check(config))
    allow_many_files()
    with runtime_folder() as runtime:
        launch = render_launch(config, runtime, module=arguments["module"])
        for decision in decisions:
            log.info("decision", what=decision.what, choice=decision.choice, reason=decision.reason)
        log.info("engine command", command=str(launch))
        async with engine_client(str(engine_socket(runtime))) as client:
            supervisor = Supervisor(config, launch, runtime, client, decisions)
            return await _serve(supervisor, config, host, runtime, arguments)


async def _serve(supervisor: Supervisor, config: Config, host: str, runtime: Path, arguments: Mapping[str, Any]) -> int:
    gpus = GpuMeter(config.devices.gpus)
    relay = Relay(
        secrets.token_hex(32),
        engine_socket(runtime),
        introduce=lambda: [{"config": config_message(config)}, {"status": status_message(supervisor.status)}],
        pulse=lambda: {"gpus": gpu_messages(gpus.read())},
    )
    ended, given_up = asyncio.Event(), asyncio.Event()

    def show(status: Status) -> None:
        relay.send_to_all({"status": status_message(status)})
        say(state=status.state.value, reason=status.reason)
        if status.given_up:
            given_up.set()

    supervisor.subscribe(show)
    signals = Signals(on_second=supervisor.kill)
    server = await relay.listen(host, arguments["ports"])
    say(port=server.sockets[0].getsockname()[1], secret=relay.secret)
    helpers = [asyncio.create_task(relay.run()), asyncio.create_task(_report_load(relay))]
    await _watch_stdin(ended)
    running = asyncio.create_task(supervisor.run())
    try:
        await first_done(running, signals.first.wait(), ended.wait(), given_up.wait())
        last = supervisor.status
        supervisor.drain("the replica is being stopped")
        if signals.first.is_set():
            log.info("draining", connections=len(relay.loads), seconds=arguments["drain"])
            waiting = relay.wait_for_none(arguments["drain"])
            await first_done(waiting, signals.second.wait(), ended.wait())
    finally:
        supervisor.stop()
        await asyncio.wait({running})
        server.close()
        for helper in helpers:
            helper.cancel()
    running.result()
    if given_up.is_set():
        say(error=last.reason)
        return last.diagnosis.exit_code if last.diagnosis else UNKNOWN_EXIT_CODE
    return signals.exit_code


async def _report_load(relay: Relay) -> None:
    while True:
        say(load=sum(relay.loads.values()))
        await asyncio.sleep(PULSE)


async def _watch_stdin(ended: asyncio.Event) -> None:
    """Sets `ended` once the other end of stdin is closed."""

    class Watch(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            ended.set()

    await asyncio.get_running_loop().connect_read_pipe(Watch, sys.stdin)


if __name__ == "__main__":
    main()
