"""The gateway's end of one replica."""

import asyncio
import time

import pytest

from server.cluster.link import status_message
from server.cluster.replica import Address, Replica
from server.gateway.exchange import EngineGoneError
from server.supervisor import State, Status

LIMIT = 10.0  # seconds: a bound on a hang


async def test_requests_at_an_engine_that_its_replica_gave_up_end_at_once() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        replica = Replica(Address("one", "m", "127.0.0.1", port, "secret"), 5, lambda _: None)

        async def ask() -> None:
            async with replica._exchange("POST", b"/v1/completions", [], b"{}"):
                pass

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        now = time.monotonic()
        replica._take({"status": status_message(Status(State.FAILED, "hung", since=now, started_at=now))})
        with pytest.raises(EngineGoneError, match="it was given up"):
            await asyncio.wait_for(asking, LIMIT)
        replica._exchange.close()
