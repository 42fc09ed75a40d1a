"""`voltserve serve`: gateway and supervisor in one event loop, from the bound port to the last request."""

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog
import uvicorn
import uvloop

from server import logs
from server.config.render import ENGINE_MODULE, engine_socket, overridden, render_launch
from server.config.settings import Config
from server.decisions import Decision, costly
from server.diagnosis.catalogue import UNKNOWN_EXIT_CODE
from server.gateway import Gateway
from server.gateway.demand import Demand
from server.gateway.exchange import EngineSocket
from server.gateway.limits import Admission
from server.gateway.listener import http_server
from server.gateway.pool import Pool, Upstream
from server.gateway.swap import Swap
from server.run import preflight
from server.run.lifetime import BACKLOG, Signals, allow_many_files, first_done, runtime_folder
from server.run.terminal import Reporter, printable_url, reporter
from server.supervisor import OnDemandSupervisor, State, Status, Supervisor
from server.supervisor.probe import engine_client

log = structlog.get_logger("voltserve.serve")


def serve(configs: Sequence[Config], module: str = ENGINE_MODULE) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP, or until no engine can ever work with these settings and models' files.

    Returns the exit code: 0 after an orderly end with no engine down; else the diagnosis' exit code.

    Args:
        configs: one merged configuration per engine; the gateway's settings are the same in each.
        module: the Python module that is the engine.

    Raises:
        PreflightError: serving cannot work; nothing was started.
    """
    gateway = configs[0]
    checked = [(*config.decisions, *overridden(config), *preflight.check(config)) for config in configs]
    allow_many_files()
    sock = preflight.bind(gateway.host, gateway.port)
    with contextlib.closing(sock), contextlib.ExitStack() as stack:
        url = printable_url(gateway.host, sock.getsockname()[1])
        plans = [
            _Plan(config, decisions, stack.enter_context(runtime_folder()), reporter(config, url))
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
    """One engine's inputs, and the reporter that shows its start on the terminal."""

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
            level = "warning" if costly([decision]) else "info"
            getattr(log, level)("decision", what=decision.what, choice=decision.choice, reason=decision.reason, **name)
        log.info("engine command", command=str(launch), **name)
        kind = Supervisor if config.demand is None else OnDemandSupervisor
        supervisor = kind(config, launch, plan.runtime, client, plan.decisions)
        supervisor.subscribe(plan.show.show)
        supervisor.subscribe(functools.partial(_break_off, exchange))
        admission = Admission(config.max_in_flight, config.queue_size, config.queue_timeout)
        demand = None
        if config.demand is not None and isinstance(supervisor, OnDemandSupervisor):
            limit = config.queue_size
            demand = Demand(config.name, supervisor, admission, config.demand, limit, exchange.break_off)
        upstream = Upstream(config, client, exchange, lambda: supervisor.status, admission, demand=demand)
        return cls(supervisor, upstream)

    async def run(self) -> None:
        """The supervisor's run, with the engine's name in each line of the log where there are several."""
        if self.upstream.name:
            structlog.contextvars.bind_contextvars(engine=self.upstream.name)
        await self.supervisor.run()


async def _run(plans: Sequence[_Plan], sock: socket.socket, module: str) -> int:
    config = plans[0].config
    async with contextlib.AsyncExitStack() as stack:
        engines = [await _connected(plan, module, stack) for plan in plans]
        supervisors = [engine.supervisor for engine in engines]
        swap = Swap([engine.upstream.demand for engine in engines if engine.upstream.demand is not None])
        gateway = Gateway(config, Pool([engine.upstream for engine in engines]))
        hopeless = _observed(engines, gateway)
        http = http_server(gateway, config.body_timeout)
        # Objects made so far live as long as the process. Excluding them makes garbage collection fast.
        gc.collect()
        gc.freeze()
        signals = Signals(on_second=lambda: _kill_at_once(supervisors, http))
        sock.listen(BACKLOG)  # uvicorn does so later: until then clients would be refused
        log.info("listening", host=config.host, port=sock.getsockname()[1])
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        running = [asyncio.create_task(engine.run()) for engine in engines]
        try:
            await first_done(serving, *running, signals.first.wait(), hopeless.wait())
            code = next(filter(None, (_exit_code(supervisor.status) for supervisor in supervisors)), 0)
            await _drained(supervisors, swap, gateway, signals, _why(signals, hopeless, code), config.drain_timeout)
        finally:
            swap.close()
            for supervisor in supervisors:
                supervisor.stop()
            await asyncio.wait(running)
            http.should_exit = True
            await asyncio.wait({serving})
            await gateway.close()
        for task in (*running, serving):
            task.result()
    log.info("stopped")
    return signals.exit_code or code


async def _connected(plan: _Plan, module: str, stack: contextlib.AsyncExitStack) -> _Engine:
    """An engine with its connections, which `stack` closes."""
    path = str(engine_socket(plan.runtime))
    client = await stack.enter_async_context(engine_client(path))
    exchange = stack.enter_context(contextlib.closing(EngineSocket(path)))
    return _Engine.of(plan, client, exchange, module)


def _observed(engines: Sequence[_Engine], gateway: Gateway) -> asyncio.Event:
    """Has the gateway count each engine's states. The event is set once no engine can ever work."""
    hopeless = asyncio.Event()

    def check_hopeless(_: Status) -> None:
        if all(engine.supervisor.status.lasting for engine in engines):
            hopeless.set()

    for engine in engines:
        engine.supervisor.subscribe(gateway.metrics.observer(engine.upstream.name))
        engine.supervisor.subscribe(check_hopeless)
    return hopeless


def _why(signals: Signals, hopeless: asyncio.Event, code: int) -> str:
    """The reason why serving ends; an error in the log where no signal asked for it."""
    if signals.name:
        return f"{signals.name} came"
    if not hopeless.is_set():
        return "the gateway ended"
    why = "no engine can be started; the diagnosis says what to do first"
    log.error("serve ends", reason=why, exit_code=code)
    return why


async def _drained(
    supervisors: Sequence[Supervisor], swap: Swap, gateway: Gateway, signals: Signals, why: str, limit: float
) -> None:
    """Admits no further request, and waits for those in flight: until a second signal, or for `limit` seconds."""
    for supervisor in supervisors:
        supervisor.drain(why)
    swap.close()
    log.info("draining", in_flight=gateway.in_flight.count, seconds=limit)
    await first_done(gateway.in_flight.wait_for_none(), signals.second.wait(), limit=limit)
    if gateway.in_flight.count:
        log.warning("requests are cut off", in_flight=gateway.in_flight.count)


def _break_off(exchange: EngineSocket, status: Status) -> None:
    """Ends the requests at a failed engine. A hanging engine would hold them until it is killed."""
    if status.state is State.FAILED:
        exchange.break_off_soon("it was given up")


def _exit_code(last: Status) -> int:
    """0 unless the engine was down at the end: then its diagnosis' exit code. One that made room is not down."""
    if last.last_exit is None or last.state in {State.READY, State.DEGRADED, State.STOPPED, State.DRAINING}:
        return 0
    return last.diagnosis.exit_code if last.diagnosis else UNKNOWN_EXIT_CODE


def _kill_at_once(supervisors: Sequence[Supervisor], http: uvicorn.Server) -> None:
    for supervisor in supervisors:
        supervisor.kill()
    http.force_exit = True
