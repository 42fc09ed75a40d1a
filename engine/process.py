"""Ties the engine's processes together: none outlives its parent, and none listens beyond this machine."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise

from engine.environment import LAUNCHER, SUPERVISOR

# Defaults for one machine. A set-up over several machines sets its own interfaces, which take precedence.
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM would look up this machine's outward address
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def spans_machines(arguments: Sequence[str]) -> bool:
    """Whether the engine's command line makes Ray start the workers, on any of its nodes."""
    return ("--distributed-executor-backend", "ray") in pairwise(arguments)


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Makes processes with `environment` talk over loopback, unless the user set other interfaces."""
    for name, value in LOOPBACK.items():
        environment.setdefault(name, value)


def become_launcher() -> None:
    """Ties this process to its supervisor, and every process of the engine to this one.

    A forked child is tied at the fork. A spawned child is tied when it loads our plugin (`follow_launcher`); the
    variable set here tells it to. The kernel delivers the signal when the parent *thread* ends, so start children from
    threads that live as long as the process.

    Raises:
        OSError: the kernel refused.
    """
    follow_supervisor()
    os.environ[LAUNCHER] = str(os.getpid())
    # A SIGTERM that arrives between the fork and _start_afresh waits, and does not reach the parent's handler.
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_start_afresh)


def follow_supervisor() -> None:
    """Ties this process to its parent. A supervisor passes its process id in a variable.

    Raises:
        OSError: the kernel refused.
    """
    supervisor = os.environ.pop(SUPERVISOR, None)
    die_with_parent(None if supervisor is None else int(supervisor))


def follow_launcher() -> None:
    """Ties this process to its parent if a launcher started it. It does nothing in a process of the user's own."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if launcher in (0, os.getpid()):
        return
    parent = multiprocessing.parent_process()  # vLLM spawns or forks, so there is no fork server in between
    die_with_parent(None if parent is None else parent.pid)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # it ended before we were tied to our parent, or we were already reparented
        os._exit(1)


def die_with_parent(parent: int | None) -> None:
    """Makes the kernel kill this process when its parent dies for any reason.

    The kernel only reports later deaths of the current parent. An orphan already has another parent, so this process
    ends at once if its parent is not `parent`.

    Args:
        parent: the process that started this one, if it is known.

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent not in (None, os.getppid()):
        os._exit(1)


def _start_afresh() -> None:
    """Resets the signal handling that a forked child inherits.

    The wake-up descriptor is shared with the parent's event loop, which would treat the child's SIGTERM as its own.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(_forking)
    _release_sigterm()


def _hold_sigterm() -> None:
    global _forking  # noqa: PLW0603 - a fork hook has no other way to pass a value to the child
    _forking = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


_LIBC = ctypes.CDLL(None, use_errno=True)
_forking: int | None = None  # in a forked child: its parent's process id
