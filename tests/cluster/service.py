"""`voltserve deploy` on a test's cluster, and clients that load it and keep count of what became of each request."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from server.machine import command_line, describe_machine, today
from tests.cluster.ray_nodes import BIN, RayCluster
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PORT = 8000
READY_LIMIT_S = 180  # bounds on hangs, not checks of speed
FAKE = (sys.executable, "-m", "tests.fakes.deploy")
REAL = (str(BIN / "voltserve"), "deploy", "--config")


@dataclass
class Service:
    """The models of `file` on `cluster`, and their gateway on the head."""

    cluster: RayCluster
    file: Path
    gateway: subprocess.Popen[bytes]
    url: str

    def health(self) -> tuple[int, list[dict[str, Any]]]:
        """The status code of `/health`, and its engines."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=10)
        except httpx.HTTPError:
            return 0, []
        return answer.status_code, answer.json()["engines"]

    def ready_on(self) -> list[str]:
        """The addresses of the machines that ready replicas are on."""
        return sorted(one["node"] for one in self.health()[1] if one["state"] == "ready")

    def wait_for_replicas(self, count: int, what: str = "", *, but_not_on: str = "") -> list[str]:
        """Waits for exactly so many ready replicas; where they are."""

        def there() -> list[str] | None:
            found = self.ready_on()
            return found if len(found) == count and but_not_on not in found else None

        hosts: list[str] = wait_until(there, READY_LIMIT_S, f"{count} ready replicas {what}; now: {self.health()}")
        return hosts

    def update(self, **model: Any) -> None:
        """Changes the model in the file, and has it rolled out; returns when that is done."""
        content = yaml.safe_load(self.file.read_text())
        content["models"][0].update(model)
        self.file.write_text(yaml.safe_dump(content))
        self.cluster.run(*FAKE, str(self.file), "--no-gateway", limit_s=READY_LIMIT_S)

    def tokens(self) -> dict[str, float]:
        """What each replica has generated."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
        return {line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}


@contextlib.contextmanager
def serving(
    cluster: RayCluster, model: Mapping[str, Any], *flags: str, command: tuple[str, ...] = FAKE, port: int = PORT
) -> Iterator[Service]:
    """The model, as cluster.yaml has it, behind a gateway that is up but need not be ready."""
    assert cluster.head is not None
    file = cluster.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"schema": 1, "models": [dict(model)]}))
    address = cluster.head.address
    gateway_command = [*command, str(file), "--host", address, "--port", str(port), *flags]
    gateway = cluster.driver(*gateway_command)
    service = Service(cluster, file, gateway, f"http://{address}:{port}")
    wait_until(lambda: service.health()[0] or gateway.poll(), READY_LIMIT_S, "the gateway's /health")
    assert gateway.poll() is None, f"it ended with {gateway.poll()}; {cluster.folder} has its log"
    try:
        yield service
    finally:
        gateway.kill()  # nsenter's child ends with its machine


def report(what: str, **loads: Load) -> None:
    """Prints what became of the requests, and adds it to the file that CLUSTER_RESULTS names, if it does."""
    ends = {name: load.summary() for name, load in loads.items()}
    print(what, ends)
    if path := os.environ.get("CLUSTER_RESULTS"):
        entry = {"date": today(), "machine": describe_machine(), "command": command_line(), "seen": what}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "requests": ends}) + "\n")


@dataclass
class Outcome:
    """One request's outcome: `begun` when its first event had arrived, `end` the error event's code or `done`."""

    kind: str
    began_at: float
    begun: bool = False
    end: str = ""
    words: str = ""

    @property
    def fine(self) -> bool:
        """Whether it was answered to its end."""
        return self.end == "done"


@dataclass
class Load:
    """Clients that ask again as soon as they are answered. Half of them stream."""

    url: str
    clients: int
    body: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for index in range(self.clients):
            thread = threading.Thread(target=self._client, args=(index % 2 == 0,), daemon=True)
            thread.start()
            self._threads.append(thread)
            time.sleep(0.13)  # so that at any moment some have begun to be answered and some have not
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a request neither ended nor failed"

    def failed(self) -> list[Outcome]:
        """Those not answered to their end."""
        return [one for one in self.outcomes if not one.fine]

    def summary(self) -> dict[str, int]:
        """The number of requests by their end."""
        ends = (f"{one.kind}, {'begun' if one.begun else 'not begun'}: {one.end}" for one in self.outcomes)
        return dict(Counter(ends))

    def _client(self, stream: bool) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                outcome = Outcome("stream" if stream else "whole", time.monotonic())
                try:
                    (self._stream if stream else self._whole)(client, outcome)
                except httpx.HTTPError as error:
                    outcome.end = type(error).__name__
                self.outcomes.append(outcome)
                if not outcome.fine:
                    time.sleep(0.2)

    def _whole(self, client: httpx.Client, outcome: Outcome) -> None:
        answer = client.post(f"{self.url}/v1/completions", json=dict(self.body))
        if answer.is_success:
            outcome.words, outcome.end = answer.json()["choices"][0]["text"], "done"
        else:
            outcome.end = f"{answer.status_code} {answer.json()['error']['code']}"

    def _stream(self, client: httpx.Client, outcome: Outcome) -> None:
        with client.stream("POST", f"{self.url}/v1/completions", json={**self.body, "stream": True}) as answer:
            if not answer.is_success:
                outcome.end = f"{answer.status_code} {json.loads(answer.read())['error']['code']}"
                return
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    outcome.end = "done"
                    return
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    outcome.end = event["error"]["code"]
                    return
                outcome.begun = True
                outcome.words += event["choices"][0]["text"] if event["choices"] else ""
            outcome.end = "ended without an end"
