"""A Ray cluster whose nodes are machines of `machines.py`: the head, the workers, and the head's view of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.machines import Machine, Machines
from tests.waiting import wait_until

RAY_PORT = 6379
START_LIMIT_S = 240  # a bound on hangs, not a check of speed
BIN = Path(sys.prefix) / "bin"

# The head calls a node dead after this many unanswered checks, so that a test need not wait out Ray's 15 s and more.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
# What else a node runs without: none of it is tested, and two cores must do for three nodes.
LEAN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_register_timeout_seconds": "120",
}


@dataclass
class RayCluster:
    """Ray over machines. `env` is what every node and every driver gets over this process's own."""

    machines: Machines
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    head: Machine | None = None

    @property
    def address(self) -> str:
        """Where the head listens, HOST:PORT."""
        assert self.head is not None, "no head was started"
        return f"{self.head.address}:{RAY_PORT}"

    def start_head(self, *, cpus: int = 1, gpus: int = 0, resources: Mapping[str, float] | None = None) -> Machine:
        """The head, on a machine of its own; returns when it answers."""
        self.head = self.machines.add("head")
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        self._start(self.head, role, cpus, gpus, resources or {})
        wait_until(lambda: len(self.nodes()) == 1, START_LIMIT_S, f"Ray's head; see {self.log(self.head)}")
        return self.head

    def start_worker(
        self, name: str, *, cpus: int = 1, gpus: int = 0, resources: Mapping[str, float] | None = None
    ) -> Machine:
        """A worker node on a new machine; returns when the head counts it."""
        machine = self.machines.add(name)
        self._start(machine, [f"--address={self.address}"], cpus, gpus, resources or {})
        self.wait_for(machine, alive=True)
        return machine

    def wait_for(self, machine: Machine, *, alive: bool, limit_s: float = START_LIMIT_S) -> None:
        """Returns when the head counts the machine's node as alive, or as dead."""
        what = f"{machine.name} {'alive' if alive else 'dead'} in the head's eyes; see {self.log(machine)}"
        wait_until(lambda: self.nodes().get(machine.address, False) == alive, limit_s, what)

    def nodes(self) -> dict[str, bool]:
        """Every node that the head has seen, by address: whether one of that address lives. Empty: no answer."""
        from ray._raylet import GcsClient  # in C; no driver, whose start costs seconds

        try:
            found = GcsClient(address=self.address).get_all_node_info(timeout=5).values()
        except Exception:  # Ray has no narrower type for a head that does not answer yet
            return {}
        alive: dict[str, bool] = {}
        for node in found:
            address = node.node_manager_address
            alive[address] = alive.get(address, False) or node.state == node.ALIVE
        return alive

    def log(self, machine: Machine) -> Path:
        """What `ray start` said on the machine; Ray's own logs are under `machine.folder`."""
        return self.folder / f"{machine.folder.name}.log"

    def environment(self, machine: Machine) -> dict[str, str]:
        """The environment of a process on the machine: what docs/cluster.md has users set, and this cluster's own."""
        interface = {"VLLM_HOST_IP": machine.address, "GLOO_SOCKET_IFNAME": "eth0"}
        head = {"RAY_ADDRESS": self.address} if self.head else {}
        own = {name: value for name, value in os.environ.items() if not name.startswith("VOLTSERVE_")}
        return {**own, **LEAN, **HEALTH_CHECKS, **interface, **head, **self.env,
                "PATH": f"{BIN}:{os.environ['PATH']}"}  # fmt: skip

    def driver(self, *command: str, on: Machine | None = None) -> subprocess.Popen[bytes]:
        """A process that finds this cluster by RAY_ADDRESS, on the head's machine by default."""
        machine = on or self.head
        assert machine is not None, "no head was started"
        return machine.start(command, self.environment(machine), self.folder / f"{machine.folder.name}-driver.log")

    def run(self, *command: str, on: Machine | None = None, limit_s: float = START_LIMIT_S) -> str:
        """The standard output of such a process, run to its end. Raises AssertionError where it fails."""
        machine = on or self.head
        assert machine is not None, "no head was started"
        done = machine.run(command, self.environment(machine), limit_s)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, machine: Machine, role: list[str], cpus: int, gpus: int, resources: Mapping[str, float]) -> None:
        size = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--resources={json.dumps(dict(resources))}"]
        command = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000",
                   f"--node-ip-address={machine.address}", *size, *role]  # fmt: skip
        # As Compose's `restart: unless-stopped`: a node that was given up while cut off ends, and must start anew.
        forever = ["bash", "-c", 'while :; do "$@"; sleep 1; done', "restarting", *command]
        env = self.environment(machine)
        env.pop("RAY_ADDRESS")  # `ray start` has a flag for it, and a head must not look for another head
        machine.start(forever, env, self.log(machine))
