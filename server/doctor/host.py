"""Reads the machine itself: limits, shared memory, container, port."""

import os
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Sizes in bytes. `shared_memory` is None without /dev/shm; `port_problem` is empty where the port is free.
    `locked_memory` is negative where it has no limit; `affinity` has the cores that this process may use.

    `device_nodes`: /dev/nvidia0, … that this process may open: a container has them only if it was started with GPUs.
    """

    cores: int
    memory_available: int
    shared_memory: int | None
    open_files: tuple[int, int]
    locked_memory: int
    affinity: frozenset[int]
    container: bool
    docker: bool
    container_toolkit: bool
    device_nodes: tuple[str, ...]
    address: str
    port_problem: str


def read_host(
    address: str, port: int, root: Path = Path("/"), which: Callable[[str], str | None] = shutil.which
) -> Host:
    """Reads it. `root` stands for / and `which` for the search along PATH."""
    from server.config.presets import usable_cores
    from server.plan.settings import available_memory

    shm = root / "dev/shm"
    nodes = sorted(str(path) for path in (root / "dev").glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK))
    return Host(
        cores=usable_cores(),
        memory_available=available_memory((root / "proc/meminfo").read_text(encoding="ascii")),
        shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        affinity=frozenset(os.sched_getaffinity(0)),
        container=(root / ".dockerenv").exists() or (root / "run/.containerenv").exists(),
        docker=which("docker") is not None,
        container_toolkit=which("nvidia-ctk") is not None or which("nvidia-container-cli") is not None,
        device_nodes=tuple(nodes),
        address=f"{address}:{port}",
        port_problem=_port_problem(address, port),
    )


def _port_problem(address: str, port: int) -> str:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
