"""The actor that Ray places on a machine for each replica: starts `server.cluster.node` there and watches it."""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

import ray
from ray import serve

from server.cluster.layout import DIRECTORY
from server.cluster.on_ray.scaling import LOAD

ANNOUNCED = 2.0  # seconds between two announcements


class EngineReplica:
    """One replica. Serve counts it as running once its constructor has returned: when its engine is ready.

    Args:
        arguments: `file.replica_arguments`.
    """

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._arguments = arguments
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._host: str = ray.util.get_node_ip_address()
        self._directory = serve.get_deployment_handle("directory", DIRECTORY)
        self._address: dict[str, Any] = {}
        self._load = 0.0
        self._failure = ""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.cluster.node", self._host),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
        )
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._announce())]
        if self._process.stdin is not None:  # kept open: its end shows the process that we are gone
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        waiting = {asyncio.create_task(event.wait()) for event in (self._ready, self._ended)}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self.check_health()

    async def check_health(self) -> None:
        """Raises RuntimeError once the replica has ended; Serve then starts another, elsewhere perhaps."""
        if self._ended.is_set():
            raise RuntimeError(f"the replica on {self._host} has ended: {self._failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figure that `on_ray.scaling` uses; called by Serve."""
        return {LOAD: self._load}

    async def __del__(self) -> None:
        """Ends the replica once its requests have finished; called by Serve, which sets the time limit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._ended.wait()

    async def _read(self) -> None:
        """Reads the replica's messages until it ends."""
        stream = self._process.stdout
        while stream is not None and (text := await stream.readline()):
            message = json.loads(text)
            if "port" in message:
                self._address = message
            if message.get("state") == "ready":
                self._ready.set()
            self._load = message.get("load", self._load)
            self._failure = message.get("error", self._failure)
        code = await self._process.wait()
        if code and not self._failure:
            self._failure = f"exit code {code}; its log on that machine says more"
        with contextlib.suppress(Exception):  # the directory forgets it by itself, later
            withdrawn = self._directory.withdraw.remote(self._id, self._arguments["name"], self._failure)
            await asyncio.wait_for(withdrawn, ANNOUNCED)
        self._ended.set()

    async def _announce(self) -> None:
        while not self._ended.is_set():
            if self._address:
                own = {"id": self._id, "model": self._arguments["name"], "host": self._host}
                # The directory may just be moving to another machine: the next announcement reaches it.
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._directory.announce.remote({**own, **self._address}), ANNOUNCED)
            await asyncio.sleep(ANNOUNCED if self._address else 0.1)


def _environment() -> dict[str, str]:
    """This process's, with the cluster's address for engines that are split over machines. Without OMP_NUM_THREADS,
    which Ray sets to the CPUs that it counts for us; a user's own is in the file, under `env`.
    """
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
