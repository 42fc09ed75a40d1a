"""What ended a process of the engine, told to the supervisor by that process and not through the log.

While an engine serves, its log repeats what clients wrote: a refused request's traceback, the requests of a failed
step. So the supervisor believes the log only until the engine is ready, and these datagrams from then on.
"""

import logging
import traceback

from engine import progress

MAX_CHAIN = 5  # exceptions of one chain of causes, the root first

# The messages with which vLLM logs the exception that ends a process of the engine, by logger; those that it logs for
# one request's failure are not among them. A message whose arguments are process names is told as it is.
EXCEPTIONS = {
    "vllm.v1.engine.core": ("EngineCore failed to start.", "EngineCore encountered a fatal error."),
    "vllm.v1.executor.multiproc_executor": (
        "WorkerProc failed to start.",
        "WorkerProc failed.",
        "WorkerProc hit an exception.",
    ),
}
MESSAGES = {
    "vllm.v1.executor.multiproc_executor": ("Worker proc %s died unexpectedly, shutting down executor.",),
}


class Teller(logging.Handler):
    """Listens to vLLM's log for the end of a process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging in the process that fails."""
        if record.msg in MESSAGES.get(record.name, ()):
            progress.fault("", record.getMessage())
        elif record.exc_info and record.exc_info[1] and record.msg in EXCEPTIONS.get(record.name, ()):
            tell(record.exc_info[1])


def listen() -> None:
    """Has this process, and those forked off it, tell how they end. A second call does nothing."""
    log = logging.getLogger("vllm")
    if not any(isinstance(handler, Teller) for handler in log.handlers):
        log.addHandler(Teller(logging.ERROR))


def tell(error: BaseException) -> None:
    """Tells an exception that ends this process, its causes first."""
    chain = [error]
    while len(chain) < MAX_CHAIN and (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    for one in reversed(chain):
        kind = type(one)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception_only(one)).partition(": ")[2]
        progress.fault(name, text.partition("\n")[0])
