"""Describes the machine, date and command of a result."""

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load (the mean of the last minute) and system of this machine."""
    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def processor(cpuinfo: str) -> str:
    """The processor's name, from the text of /proc/cpuinfo."""
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, "unknown processor")


def today() -> str:
    """The date of a result, in UTC."""
    return datetime.now(tz=timezone.utc).date().isoformat()


def command_line() -> str:
    """This process's command as a person would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
