"""A replica's process, and the gateway's end of it."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cluster.link import greeting
from server.cluster.replica import Replica
from server.gateway.exchange import EngineGoneError
from server.supervisor import State
from tests.server.cluster.nodes import LIMIT, Node, children, node, until
from tests.server.conftest import alive, make_model


async def linked(one: Node, silence: float = 15.0) -> tuple[Replica, "asyncio.Task[None]"]:
    """The gateway's end, once the replica is ready."""
    await until(lambda: "ready" in one.states, f"ready; said: {one.said}")
    replica = Replica(one.address, silence, lambda _: None)
    running = asyncio.create_task(replica.run())
    await until(lambda: replica.upstream and replica.status.state is State.READY, "linked")
    return replica, running


async def complete(replica: Replica, **body: Any) -> bytes:
    assert replica.upstream is not None
    content = b'{"prompt": "Hi", "stream": true, "fake": {"tokens": 8, "delay": 0.1}}'
    async with replica.upstream.exchange(
        "POST", b"/v1/completions", [(b"content-type", b"application/json")], content
    ) as answer:
        return b"".join([chunk async for chunk in answer.chunks()])


async def test_it_tells_its_states_and_serves_whoever_has_the_secret(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m", load_seconds=0.5)) as one:
        replica, running = await linked(one)
        assert one.states == ["starting", "loading", "warming", "ready"]
        assert replica.upstream is not None
        assert replica.upstream.models == ("m",)
        assert (replica.upstream.name, replica.upstream.node) == ("m-one", "127.0.0.1")
        assert (await complete(replica)).endswith(b"data: [DONE]\n\n")
        assert (await replica.upstream.client.get("/v1/models")).json()["data"][0]["id"] == "m"
        reader, writer = await asyncio.open_connection("127.0.0.1", one.address.port)
        writer.write(greeting("wrong", "engine") + b"GET /health HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        running.cancel()


async def test_it_counts_the_requests_that_gateways_have_for_it(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m")) as one:
        replica, running = await linked(one)
        assert replica.upstream is not None
        replica.upstream.admission.running = 3
        await until(lambda: one.said[-1].get("load") == 3, f"its load; said: {one.said[-3:]}")
        running.cancel()
        await until(lambda: one.said[-1].get("load") == 0, "a gateway that is gone has none")


async def test_told_to_end_it_lets_requests_finish(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m"), drain=120) as one:
        replica, running = await linked(one)
        asking = asyncio.create_task(complete(replica))
        await asyncio.sleep(0.3)
        one.process.terminate()
        await until(lambda: replica.status.state is State.DRAINING, "the gateway hears of it")
        assert (await asking).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(one.process.wait(), LIMIT) == 0, "no connection that rests holds it up"
        running.cancel()


async def test_requests_that_take_too_long_are_cut_off(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m", answer={"tokens": 10**6}), drain=1) as one:
        replica, running = await linked(one)
        assert replica.upstream is not None
        asking = asyncio.create_task(
            replica.upstream.client.post("/v1/completions", json={"prompt": "Hi", "fake": {"delay": 9}})
        )
        await asyncio.sleep(0.3)
        one.process.terminate()
        assert await asyncio.wait_for(one.process.wait(), LIMIT) == 0
        with contextlib.suppress(httpx.HTTPError):
            assert (await asking).is_server_error
        running.cancel()


async def test_it_ends_when_its_actor_is_gone(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m")) as one:
        await until(lambda: "ready" in one.states, "ready")
        engines = children(one.process.pid)
        assert engines
        assert one.process.stdin is not None
        one.process.stdin.close()
        await asyncio.wait_for(one.process.wait(), LIMIT)
        await until(lambda: not any(map(alive, engines)), "the engine has ended too")


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.06, 0.1, 0.3, 1.0])
async def test_its_engine_ends_with_it_however_early_it_is_killed(tmp_path: Path, seconds: float) -> None:
    async with node(make_model(tmp_path / "m")) as one:
        engines = await until(lambda: children(one.process.pid), "the engine's process")
        await asyncio.sleep(seconds)
        one.process.kill()
        await one.process.wait()
        await until(lambda: not any(map(alive, engines)), "the engine has ended too")


async def test_an_engine_that_fails_for_good_is_reported_with_its_diagnosis(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    async with node(model, module="tests.no_such_engine") as one:
        code = await asyncio.wait_for(one.process.wait(), LIMIT + 30)
        assert code not in (0, None)
        await until(lambda: "error" in one.said[-1], "why")
        assert "given up after 5 failures" in one.said[-1]["error"]


async def test_a_machine_that_cannot_serve_the_model_says_why(tmp_path: Path) -> None:
    async with node(tmp_path / "nowhere") as one:
        assert await asyncio.wait_for(one.process.wait(), LIMIT) == 65
        await until(lambda: one.said, "why")
        assert "does not exist" in one.said[-1]["error"]


async def test_silence_breaks_requests_off_and_word_takes_the_replica_back(tmp_path: Path) -> None:
    async with node(make_model(tmp_path / "m")) as one:
        replica, running = await linked(one, silence=3.0)
        asking = asyncio.create_task(complete(replica))
        await asyncio.sleep(0.3)
        os.kill(one.process.pid, signal.SIGSTOP)  # as a cut cable: nothing arrives, and no error either
        with pytest.raises(EngineGoneError, match="no word from it for 3 s"):
            await asyncio.wait_for(asking, LIMIT)
        assert replica.status.state is State.DEGRADED
        assert "unreachable" in replica.status.reason
        os.kill(one.process.pid, signal.SIGCONT)
        await until(lambda: replica.status.state is State.READY, "ready again")
        assert (await complete(replica)).endswith(b"data: [DONE]\n\n")
        running.cancel()


async def test_it_listens_within_the_ports_given(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    first = taken.sockets[0].getsockname()[1]
    async with node(make_model(tmp_path / "m"), ports=[first, first + 20]) as one:
        await until(lambda: one.said, "listening")
        assert first < one.address.port <= first + 20
    async with node(make_model(tmp_path / "m"), ports=[first, first]) as one:
        assert await asyncio.wait_for(one.process.wait(), LIMIT) == 2
        await until(lambda: one.said, "why")
        assert f"ports {first} to {first}" in one.said[-1]["error"]
    taken.close()
