"""`voltserve serve`: gateway and supervisor in one event loop, from the bound port to the last request."""

import asyncio
import contextlib
import gc
import resource
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog
import uvicorn
import uvloop

from server import logs, preflight
from server.config import Config
from server.decisions import Decision
from server.diagnosis.catalogue import UNKNOWN_EXIT_CODE
from server.errors import PreflightError
from server.gateway import Gateway
from server.gateway.exchange import EngineSocket
from server.gateway.limits import Admission
from server.gateway.listener import http_server
from server.gateway.pool import Pool, Upstream
from server.render import ENGINE_MODULE, engine_socket, overridden, render_launch
from server.supervisor import State, Status, Supervisor
from server.supervisor.probe import engine_client
from server.terminal import Reporter, printable_url, reporter

# A Unix socket's path must fit sockaddr_un.sun_path, 108 bytes with its final zero (unix(7)).
MAX_SOCKET_PATH = 107
BACKLOG = 2048  # connections that wait to be accepted; uvicorn's own default
EXIT_BY_SIGNAL = 128  # plus the signal's number, as shells have it

log = structlog.get_logger("voltserve.serve")


def serve(configs: Sequence[Config], module: str = ENGINE_MODULE) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0 after an orderly end, if no engine was down then.

    Args:
        configs: one merged configuration an engine; the gateway's settings are the same in each.
        module: the Python module that is the engine.

    Raises:
        PreflightError: serving cannot work; nothing was started.
    """
    gateway = configs[0]
    checked = [(*config.decisions, *overridden(config), *preflight.check(config)) for config in configs]
    _allow_many_files()
    sock = preflight.bind(gateway.host, gateway.port)
    with contextlib.closing(sock), contextlib.ExitStack() as stack:
        url = printable_url(gateway.host, sock.getsockname()[1])
        plans = [
            _Plan(config, decisions, stack.enter_context(_runtime_folder()), reporter(config, url))
            for config, decisions in zip(configs, checked, strict=True)
        ]
        logs.configure(gateway.log_level, gateway.log_format, plans[0].show.write)
        try:
            return uvloop.run(_run(plans, sock, module))
        finally:
            for plan in plans:
                plan.show.close()


@dataclass(frozen=True)
class _Plan:
    """What one engine is started from, and who tells the person at the terminal of it."""

    config: Config
    decisions: tuple[Decision, ...]
    runtime: Path
    show: Reporter


@dataclass(frozen=True)
class _Engine:
    """A supervisor, and how the gateway reaches its engine."""

    supervisor: Supervisor
    upstream: Upstream

    @classmethod
    def of(cls, plan: _Plan, client: httpx.AsyncClient, exchange: EngineSocket, module: str) -> "_Engine":
        config = plan.config
        launch = render_launch(config, plan.runtime, module=module)
        name = {"engine": config.name} if config.name else {}
        for decision in plan.decisions:
            log.info("decision", what=decision.what, choice=decision.choice, reason=decision.reason, **name)
        log.info("engine command", command=str(launch), **name)
        supervisor = Supervisor(config, launch, plan.runtime, client, plan.decisions)
        supervisor.subscribe(plan.show.show)
        admission = Admission(config.max_in_flight, config.queue_size, config.queue_timeout)
        return cls(supervisor, Upstream(config, client, exchange, lambda: supervisor.status, admission))

    async def run(self) -> None:
        """The supervisor's run, with the engine's name in each line of the log where there are several."""
        if self.upstream.name:
            structlog.contextvars.bind_contextvars(engine=self.upstream.name)
        await self.supervisor.run()


async def _run(plans: Sequence[_Plan], sock: socket.socket, module: str) -> int:
    config = plans[0].config
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for plan in plans:
            path = str(engine_socket(plan.runtime))
            client = await stack.enter_async_context(engine_client(path))
            exchange = stack.enter_context(contextlib.closing(EngineSocket(path)))
            engines.append(_Engine.of(plan, client, exchange, module))
        supervisors = [engine.supervisor for engine in engines]
        gateway = Gateway(config, Pool([engine.upstream for engine in engines]))
        for engine in engines:
            engine.supervisor.subscribe(gateway.metrics.observer(engine.upstream.name))
        http = http_server(gateway, config.body_timeout)
        # What was made so far lives as long as the process: without it, looking for garbage takes no time that shows.
        gc.collect()
        gc.freeze()
        signals = _Signals(on_second=lambda: _hurry(supervisors, http))
        sock.listen(BACKLOG)  # uvicorn does so later: until then clients would be refused
        log.info("listening", host=config.host, port=sock.getsockname()[1])
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        running = [asyncio.create_task(engine.run()) for engine in engines]
        try:
            await _first(serving, *running, signals.first.wait())
            code = next(filter(None, (_exit_code(supervisor.status) for supervisor in supervisors)), 0)
            for supervisor in supervisors:
                supervisor.drain(f"{signals.name} came" if signals.name else "the gateway ended")
            log.info("draining", in_flight=gateway.in_flight.count, seconds=config.drain_timeout)
            await _first(gateway.in_flight.wait_for_none(), signals.second.wait(), limit=config.drain_timeout)
            if gateway.in_flight.count:
                log.warning("requests are cut off", in_flight=gateway.in_flight.count)
        finally:
            for supervisor in supervisors:
                supervisor.stop()
            await asyncio.wait(running)
            http.should_exit = True
            await asyncio.wait({serving})
        for task in (*running, serving):
            task.result()
    log.info("stopped")
    return signals.exit_code or code


def _exit_code(last: Status) -> int:
    """0 unless the engine had failed and not come back when the end came: then that of its diagnosis."""
    if last.last_exit is None or last.state in {State.READY, State.DEGRADED}:
        return 0
    return last.diagnosis.exit_code if last.diagnosis else UNKNOWN_EXIT_CODE


class _Signals:
    """SIGTERM and SIGINT: the first asks for an orderly end, the second for an immediate one."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.name = ""
        self.exit_code = 0
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if not self.first.is_set():
            self.name = number.name
            self.first.set()
            return
        self.exit_code = EXIT_BY_SIGNAL + number
        self.second.set()
        self._on_second()


def _hurry(supervisors: Sequence[Supervisor], http: uvicorn.Server) -> None:
    for supervisor in supervisors:
        supervisor.kill()
    http.force_exit = True


async def _first(*awaitables: Awaitable[object], limit: float | None = None) -> None:
    """Returns when one of these is done or `limit` seconds have passed; cancels those that were made for this call."""
    tasks = {asyncio.ensure_future(one) for one in awaitables}
    await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks.difference(awaitables):
        task.cancel()


@contextlib.contextmanager
def _runtime_folder() -> Iterator[Path]:
    """A private folder (mode 0700) for the engine's sockets, removed at the end.

    Raises:
        PreflightError: it cannot be made, or its path is too long for a Unix socket.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="voltserve-"))
    except OSError as error:
        raise PreflightError(f"no folder for the engine's sockets: {error.strerror}; set TMPDIR") from error
    try:
        if len(bytes(folder / str(uuid.uuid4()))) > MAX_SOCKET_PATH:  # vLLM's names, longer than ours
            raise PreflightError(f"{folder} is too long for a Unix socket's path ({MAX_SOCKET_PATH} bytes); set TMPDIR")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _allow_many_files() -> None:
    """Raises the soft limit of open files to the hard one: each stream needs two, and 1024 is a common soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
