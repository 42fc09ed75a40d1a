"""`python -m server.run.healthcheck`, the container's HEALTHCHECK: exit code 0 while its server is ready.

Like `serve`, it takes the address from the environment and from the command line of process 1, which ends in `python -m
server FLAGS`. So it finds the port of a container with --port.
"""

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from server.config.flags import parse_arguments
from server.config.settings import Settings, all_flags, variable_name

LIMIT_S = 8.0  # below the HEALTHCHECK's own, so that the reason is reported
PROCESS_1 = Path("/proc/1/cmdline")
MODULE = ["-m", "server"]


def address(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port to ask, from a command line that has `-m server` in it, and from its environment.

    A wildcard address is asked on loopback.

    Raises:
        ConfigError: the flags are malformed.
        ValueError: no `-m server` in `command`.
    """
    at = next((at for at in range(len(command)) if list(command[at : at + 2]) == MODULE), None)
    if at is None:
        raise ValueError(f"expected a command with {' '.join(MODULE)}, got {' '.join(command)!r}")
    given = parse_arguments(command[at + 2 :], all_flags())
    host, port = (
        str(given.get(name, environ.get(variable_name(name), Settings.model_fields[name].default)))
        for name in ("host", "port")
    )
    try:
        everywhere = ipaddress.ip_address(host)
    except ValueError:
        return host, int(port)
    if everywhere.is_unspecified:
        host = "127.0.0.1" if everywhere.version == 4 else "::1"
    return host, int(port)


def main() -> int:
    """Asks once; prints what was answered, which `docker inspect` shows."""
    host, port = address(PROCESS_1.read_text(encoding="utf-8").rstrip("\0").split("\0"), os.environ)
    connection = HTTPConnection(host, port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        print(answer.read(4096).decode("utf-8", "replace"))
    except (OSError, HTTPException) as error:
        print(f"{host}:{port} does not answer: {error}")
        return 1
    finally:
        connection.close()
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
