"""Several machines on one, for tests of a cluster: each has its own network, processes, host name and files of Ray.

A machine is a set of anonymous Linux namespaces, held by one process that dies with the test's. What is in them (Ray,
engines, network interfaces) goes with it, so nothing is left behind even where pytest itself is killed. All machines
hang on one switch, a bridge in a namespace of its own, which this machine's firewall rules (Docker's) do not reach.
Needs root.

Of files, /tmp/ray and /dev/shm are a machine's own: processes of two machines must not meet in shared memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

NEEDED = ("ip", "unshare", "nsenter", "setpriv")


def missing() -> str:
    """Why machines cannot be made here; empty where they can."""
    absent = [program for program in NEEDED if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} is absent (Debian: iproute2, util-linux)"
    return "" if os.geteuid() == 0 else "only root may make network namespaces"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")


class Namespaces:
    """Fresh namespaces and the process that keeps them: a machine's first, with which every other one dies."""

    def __init__(self, name: str, prepare: str = ":") -> None:
        # bash takes in orphans, as a first process must; --kill-child and the death signal end it with the test.
        script = f"hostname {name} && ip link set lo up && {prepare} && echo ready && exec sleep infinity >&- & wait"
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork",
             "--kill-child", "--mount-proc", "bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name}: namespaces not made: exit code {self._holder.wait()}; stderr says why")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.first_process = int(children.read_text())

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` in these namespaces."""
        return ["nsenter", f"--target={self.first_process}", "--net", "--uts", "--mount", "--pid", "--", *command]

    def kill(self) -> None:
        """Ends every process in them at once, as a loss of power would."""
        self._holder.kill()
        self._holder.communicate()


@dataclass
class Machine:
    """One machine: `address` on the switch, `folder` is its /tmp/ray, with Ray's logs, seen from outside."""

    name: str
    address: str
    folder: Path
    port: str
    namespaces: Namespaces
    alive: bool = True
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A process on the machine, in its own process group; both outputs go to `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.namespaces.enter(*command), env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], env: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
        """Runs a command on the machine to its end."""
        return subprocess.run(
            self.namespaces.enter(*command), env=dict(env), capture_output=True, text=True, timeout=limit_s, check=False
        )


class Machines:
    """The machines of one test and the switch between them. The test itself is on the network at `own_address`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._net = f"198.18.{os.getpid() % 256}"  # 198.18.0.0/15 is set apart for such networks (RFC 2544)
        self._made: list[Machine] = []
        self._switch = Namespaces("switch")
        self._in_switch("ip", "link", "add", "br0", "up", "type", "bridge")
        self.own_address = f"{self._net}.254"
        self._interface = f"vs{os.getpid()}"
        _run(
            "ip",
            "link",
            "add",
            self._interface,
            "type",
            "veth",
            "peer",
            "test",
            "netns",
            str(self._switch.first_process),
        )
        _run("ip", "address", "add", f"{self.own_address}/24", "dev", self._interface)
        _run("ip", "link", "set", self._interface, "up")
        self._in_switch("ip", "link", "set", "test", "master", "br0", "up")

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def add(self, name: str) -> Machine:
        """A new machine, connected. A name may be reused after its machine was killed, with a new address."""
        number = len(self._made) + 1
        port = f"m{number}"
        folder = self._folder / f"{number}-{name}"
        folder.mkdir(parents=True)
        shared = "/tmp/ray"  # noqa: S108 - where Ray keeps its sockets, whose paths must be short
        own = f"mkdir -p {shared} && mount --bind {folder} {shared} && mount -t tmpfs tmpfs /dev/shm"
        namespaces = Namespaces(name, own)
        first = str(namespaces.first_process)
        switch = str(self._switch.first_process)
        _run("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "eth0", "netns", first)
        machine = Machine(name, f"{self._net}.{number}", folder, port, namespaces)
        self._made.append(machine)
        for command in (("address", "add", f"{machine.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _run(*namespaces.enter("ip", *command))
        self.heal(machine)
        return machine

    def cut(self, machine: Machine) -> None:
        """Takes the machine off the switch: frames vanish, and no interface says so."""
        self._in_switch("ip", "link", "set", machine.port, "nomaster")

    def heal(self, machine: Machine) -> None:
        """Puts the machine on the switch again."""
        self._in_switch("ip", "link", "set", machine.port, "master", "br0", "up")

    def kill(self, machine: Machine) -> None:
        """Ends the machine as a loss of power would; its address answers no more."""
        machine.alive = False
        machine.namespaces.kill()
        for process in machine.processes:
            process.wait()

    def close(self) -> None:
        """Ends all machines and the network."""
        for machine in self._made:
            if machine.alive:
                self.kill(machine)
        _run("ip", "link", "delete", self._interface)  # it would go with the switch, but some time after
        self._switch.kill()

    def _in_switch(self, *command: str) -> None:
        _run(*self._switch.enter(*command))
