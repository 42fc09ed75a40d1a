"""The supervisor of an engine on demand, with the fake engine: started, retired, stopped, failed, ended."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.config.devices import Devices
from server.config.on_demand import OnDemand
from server.config.render import engine_socket, render_launch
from server.config.settings import load_config
from server.supervisor import OnDemandSupervisor, State
from server.supervisor.probe import engine_client
from server.supervisor.process import running
from tests.server.conftest import LIMIT, make_model
from tests.server.supervisor.test_supervisor import Watched


@asynccontextmanager
async def on_demand(folder: Path, **fake: object) -> AsyncIterator[tuple[OnDemandSupervisor, Watched]]:
    model = make_model(folder / "m", **fake)
    config = load_config(["--model", str(model)], {}, lambda: Devices((), "none"))
    config = config.model_copy(update={"demand": OnDemand()})
    launch = render_launch(config, folder, {"PATH": os.environ["PATH"]}, module="tests.fakes.engine")
    async with engine_client(str(engine_socket(folder))) as client:
        supervisor = OnDemandSupervisor(config, launch, folder, client)
        watched = Watched(supervisor)
        run = asyncio.create_task(supervisor.run())
        try:
            yield supervisor, watched
        finally:
            supervisor.drain("the test ends")
            supervisor.stop()
            await asyncio.wait_for(run, LIMIT)
    assert not supervisor.occupied or supervisor.status.state is State.DRAINING


def sockets(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_socket()]


async def test_it_starts_only_when_it_is_wanted_and_stops_and_starts_again(short_tmp: Path) -> None:
    async with on_demand(short_tmp) as (supervisor, watched):
        assert (supervisor.status.state, supervisor.occupied) == (State.STOPPED, False)
        for _ in range(2):
            supervisor.start()
            assert supervisor.occupied
            await watched.until_state(State.READY)
            group = watched.pid
            left = socket.socket(socket.AF_UNIX)
            left.bind(str(short_tmp / "left-by-vllm"))
            left.close()
            supervisor.retire("it makes room for b")
            assert supervisor.status.state is State.DRAINING
            assert running(group), "those under way may finish"
            supervisor.rest()
            status = await watched.until_state(State.STOPPED)
            assert (status.reason, status.last_exit, status.restarts) == ("it makes room for b", None, 0)
            assert not supervisor.occupied
            assert running(group) == []
            assert sockets(short_tmp) == ["progress.sock"]


@pytest.mark.parametrize("wait", [False, True])
async def test_a_start_that_is_not_wanted_any_more_ends_at_once(short_tmp: Path, wait: bool) -> None:
    async with on_demand(short_tmp, load_seconds=60) as (supervisor, watched):
        supervisor.start()
        if wait:
            await watched.until_state(State.LOADING)
        supervisor.retire("it makes room for b")
        supervisor.rest()
        await watched.until_state(State.STOPPED)
        assert not supervisor.occupied


async def test_a_failed_start_is_not_repeated_by_itself(short_tmp: Path) -> None:
    async with on_demand(short_tmp, fail_first=1) as (supervisor, watched):
        supervisor.start()
        status = await watched.until(lambda status: status.state is State.FAILED and status.retry_at)
        assert not supervisor.occupied
        assert status.retry_at is not None
        assert 5 < status.retry_at - time.monotonic() <= 10
        assert "shard 5 of 8 is short" in status.reason
        supervisor.start()
        assert (await watched.until_state(State.READY)).restarts == 1


async def test_an_engine_that_dies_while_it_is_ready_may_be_started_at_once(short_tmp: Path) -> None:
    async with on_demand(short_tmp) as (supervisor, watched):
        supervisor.start()
        await watched.until_state(State.READY)
        os.kill(watched.pid, signal.SIGKILL)
        status = await watched.until(lambda status: status.state is State.FAILED and not supervisor.occupied)
        assert status.retry_at is None
        supervisor.retire("too late")
        assert supervisor.status.state is State.FAILED
        supervisor.start()
        await watched.until_state(State.READY)


async def test_one_that_dies_while_it_drains_is_stopped(short_tmp: Path) -> None:
    async with on_demand(short_tmp) as (supervisor, watched):
        supervisor.start()
        await watched.until_state(State.READY)
        supervisor.retire("it makes room for b")
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until_state(State.STOPPED)
        assert not supervisor.occupied
