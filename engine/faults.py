"""Reports to the supervisor which exception ends a process of the engine, by a datagram instead of the log.

While an engine serves, its log repeats clients' words: in a refused request's traceback, and in the requests of a
failed step. So the supervisor trusts the log only until the engine is ready. From then on it trusts these datagrams.
"""

import logging
import traceback

from engine import progress

MAX_CHAIN = 5  # exceptions of one chain of causes, the root first

# vLLM's log messages for an exception that ends a process of the engine, by logger. Messages for one request's failure
# are not among them.
EXCEPTIONS = {
    "vllm.v1.engine.core": ("EngineCore failed to start.", "EngineCore encountered a fatal error."),
    "vllm.v1.executor.multiproc_executor": (
        "WorkerProc failed to start.",
        "WorkerProc failed.",
        "WorkerProc hit an exception.",
    ),
}
# Messages that are reported with their arguments, which are process names.
MESSAGES = {
    "vllm.v1.executor.multiproc_executor": (
        "Worker proc %s died unexpectedly (exit code: %s), shutting down executor.",
    ),
}


class FaultHandler(logging.Handler):
    """Watches vLLM's log for the end of a process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Reports `record` if it is about the end of a process. logging calls this in the failing process."""
        if record.msg in MESSAGES.get(record.name, ()):
            progress.fault("", record.getMessage())
        elif record.exc_info and record.exc_info[1] and record.msg in EXCEPTIONS.get(record.name, ()):
            report(record.exc_info[1])


def listen() -> None:
    """Makes this process and its forked children report how they end. A second call does nothing."""
    log = logging.getLogger("vllm")
    if not any(isinstance(handler, FaultHandler) for handler in log.handlers):
        log.addHandler(FaultHandler(logging.ERROR))


def report(error: BaseException) -> None:
    """Reports an exception that ends this process, root cause first."""
    chain = [error]
    while len(chain) < MAX_CHAIN and (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    for one in reversed(chain):
        kind = type(one)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception_only(one)).partition(": ")[2]
        progress.fault(name, text.partition("\n")[0])
