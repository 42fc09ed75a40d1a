"""`voltserve deploy`: makes Ray Serve run the models of a cluster.yaml, and is their gateway."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvloop

from server import logs
from server.cluster.file import ClusterFile, read_cluster
from server.cluster.manage import need_ray
from server.cluster.members import Expected, Members
from server.config.engines_file import OF_A_FILE
from server.config.render import ENGINE_MODULE
from server.config.settings import Settings, load_settings
from server.gateway import Gateway
from server.gateway.listener import http_server
from server.run import preflight
from server.run.lifetime import BACKLOG, Signals, allow_many_files, first_done
from server.supervisor.output import EngineOutput

WATCH, APPLY = "server.cluster.on_ray.watch", "server.cluster.on_ray.apply"
MAX_LINE = 2**24  # bytes of the directory's content as one line; a hundred nodes take some tens of kilobytes
RETRY = 2.0  # seconds between two watchers

log = structlog.get_logger("voltserve.deploy")


@dataclass(frozen=True)
class Wanted:
    """What to do: `update` what Ray Serve runs, be the `gateway`, or both."""

    update: bool = True
    gateway: bool = True


def deploy(path: Path, arguments: Sequence[str], wanted: Wanted, module: str = ENGINE_MODULE) -> int:
    """Deploys, and serves until SIGTERM or SIGINT; what Ray Serve runs stays. Returns the exit code.

    Args:
        path: the cluster.yaml.
        arguments: the gateway's settings, as serve's.
        wanted: what to do.
        module: the Python module that is the engine.

    Raises:
        ConfigError: the file, or a setting, is wrong.
        UserError: Ray is not installed.
        PreflightError: the gateway cannot listen.
    """
    file = read_cluster(path)
    need_ray()
    settings = load_settings(arguments, os.environ, str(path), OF_A_FILE)
    logs.configure(settings.log_level, settings.log_format)
    if not wanted.gateway:
        return uvloop.run(_update(file, module))
    allow_many_files()
    with contextlib.closing(preflight.bind(settings.host, settings.port)) as sock:
        return uvloop.run(_serve(file, settings, sock, module, update=wanted.update))


async def _serve(file: ClusterFile, settings: Settings, sock: socket.socket, module: str, *, update: bool) -> int:
    members = Members(settings, {model.name: Expected(model.served, model.least) for model in file.models})
    gateway = Gateway(settings, members.pool, members.gpus)
    members.report_to(gateway.metrics)
    http = http_server(gateway, settings.body_timeout)
    gc.collect()
    gc.freeze()
    signals = Signals(on_second=lambda: setattr(http, "force_exit", True))
    sock.listen(BACKLOG)
    log.info("listening", host=settings.host, port=sock.getsockname()[1])
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    watching = asyncio.create_task(_watch(members))
    updating = asyncio.create_task(_update(file, module) if update else asyncio.sleep(0, 0))
    code = 0
    try:
        await first_done(serving, watching, signals.first.wait(), _failure(updating))
        if not signals.first.is_set() and updating.done():
            code = updating.result()
        log.info("draining", in_flight=gateway.in_flight.count, seconds=settings.drain_timeout)
        waiting = gateway.in_flight.wait_for_none()
        await first_done(waiting, signals.second.wait(), limit=settings.drain_timeout)
    finally:
        for task in (watching, updating):
            task.cancel()
        await asyncio.wait({watching, updating})
        await members.close()
        http.should_exit = True
        await asyncio.wait({serving})
        await gateway.close()
    for task in (serving, watching, updating):
        if not task.cancelled():
            task.result()
    log.info("stopped; the models run on (`voltserve cluster stop` ends them)")
    return signals.exit_code or code


async def _failure(updating: "asyncio.Task[int]") -> None:
    """Returns when the update could not be made at all. `/health` reports a model that does not start."""
    if await asyncio.shield(updating) <= 1:
        await asyncio.Event().wait()


async def _update(file: ClusterFile, module: str) -> int:
    """Makes Ray Serve run the file. Exit codes: of `on_ray.apply`."""
    given = json.dumps({"file": file.model_dump(by_alias=True, mode="json"), "module": module})
    async with _child(APPLY) as child:
        if child.stdin is not None:
            child.stdin.write(given.encode() + b"\n")
        async for message in _lines(child):
            if "decision" in message:
                what, choice, reason = message["decision"]
                log.info("decision", what=what, choice=choice, reason=reason)
            if "progress" in message:
                name, text = message["progress"]
                log.info("application", name=name, status=text)
        code = await child.wait()
    (log.info if code == 0 else log.error)("update ended", exit_code=code)
    return code


async def _watch(members: Members) -> None:
    """Passes the directory's content to `members`, for ever. Without Ray's head the gateway keeps the replicas it
    knows.
    """
    while True:
        async with _child(WATCH) as child:
            async for found in _lines(child):
                members.take(found)
            log.warning("the directory cannot be read; serving with the replicas known", exit_code=await child.wait())
        await asyncio.sleep(RETRY)


@contextlib.asynccontextmanager
async def _child(module: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process of ours that talks to Ray; it ends with this block. Its errors, and Ray's, go into our log."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        limit=MAX_LINE,
        start_new_session=True,  # Ctrl-C is for the gateway, which ends its children in its time
    )
    output = EngineOutput(lambda level, line: getattr(log, level)(line))
    logging = asyncio.create_task(output.pump(child.stderr)) if child.stderr is not None else None
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        if logging is not None:
            await logging


async def _lines(child: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """The JSON lines of its output."""
    while child.stdout is not None and (text := await child.stdout.readline()):
        yield json.loads(text)
