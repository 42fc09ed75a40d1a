"""How the engine's processes are tied together: none outlives its parent, and none is heard beyond this machine."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise

from engine.environment import LAUNCHER, SUPERVISOR

# Single-node defaults: a multi-node set-up names its own interfaces and wins.
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM would ask the routing table for this machine's outward address
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def spans_machines(arguments: Sequence[str]) -> bool:
    """Whether the engine's command line has Ray start the workers, on whichever of its nodes."""
    return ("--distributed-executor-backend", "ray") in pairwise(arguments)


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Makes what is started under `environment` talk over loopback, where the user has not said otherwise."""
    for name, value in LOOPBACK.items():
        environment.setdefault(name, value)


def become_launcher() -> None:
    """Ties this process to its supervisor and every process of the engine to this one.

    A forked child is tied at the fork; a spawned one when it loads our plugin (`follow_launcher`), which it knows to do
    by the variable set here. The kernel delivers the signal when the parent *thread* ends: start children from
    threads that live as long as the process.

    Raises:
        OSError: the kernel refused.
    """
    follow_supervisor()
    os.environ[LAUNCHER] = str(os.getpid())
    # A SIGTERM that comes between the fork and _start_afresh waits, instead of going to the parent's handler.
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_start_afresh)


def follow_supervisor() -> None:
    """Ties this process to the one that started it; where that is a supervisor, it says who it is.

    Raises:
        OSError: the kernel refused.
    """
    supervisor = os.environ.pop(SUPERVISOR, None)
    die_with_parent(None if supervisor is None else int(supervisor))


def follow_launcher() -> None:
    """Ties this process to its parent where a launcher started it; does nothing in a process of the user's own."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if launcher in (0, os.getpid()):
        return
    parent = multiprocessing.parent_process()  # vLLM spawns or forks: no fork server stands between
    die_with_parent(None if parent is None else parent.pid)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # it went before we were tied to our parent, or to whom that was handed on
        os._exit(1)


def die_with_parent(parent: int | None) -> None:
    """Has the kernel kill this process when its parent dies, however that dies. Ends it where that has happened.

    The kernel tells only of deaths from now on, and of whoever is the parent by now: of an orphan that is another.

    Args:
        parent: the process that started this one, where it is known.

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
    """Rids a forked child of its parent's signal handling.

    The wake-up descriptor is shared with the parent's event loop, which would take the child's SIGTERM for its own.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(_forking)
    _release_sigterm()


def _hold_sigterm() -> None:
    global _forking  # noqa: PLW0603 - a hook at a fork has no other way to tell the child
    _forking = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


_LIBC = ctypes.CDLL(None, use_errno=True)
_forking: int | None = None  # of a forked child: its parent
