"""The engine's stdout and stderr: each line goes to our log at its own level, and the last ones are kept."""

import asyncio
import re
from collections import deque
from collections.abc import Callable

from server.diagnosis import Fault

KEPT_LINES = 50
MAX_LINE = 4000  # characters; longer lines are cut, so that no output can exhaust our memory

_LEVEL = re.compile(r"^(?:\([^)]*\) *)*\W*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_PREFIX = re.compile(r"^(?:\([^)]*\) *)+")
# Lines that name a cause: the last line of a traceback (`ValueError: …`, `torch.OutOfMemoryError: …`) and the head of a
# native crash. A rank's end and the engine launcher's account of how its processes ended also count.
_CAUSE = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b(?::|$)|.*(?:Segfault encountered|Segmentation fault)"
    r"|Worker proc \S+ died|the engine died: "
)

# Native code writes without Python's prefixes: the head of an error in torch's C++ log, or of a kernel's assertion.
_NATIVE = re.compile(
    r"\[rank\d+\]:\[[EF]\d{4} [^\]]*\] *(?:\[[^\]]*\] *)*(?:Process group watchdog thread terminated with exception: )?"
    r"|\S+\.cuh?:\d+: .*?: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion `"
)
_CLIENTS = "(APIServer "  # of the process that reads requests
_HARMLESS = re.compile(r"^(?:\([^)]*\) *)*\W*(?:DEBUG|INFO|WARNING)\b")


class EngineOutput:
    """Collects the lines of one start of the engine."""

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        # Kept apart: the root cause is printed first, and the tracebacks after it would push it out of `lines`.
        self._causes: dict[str, None] = {}
        self._native: list[Fault] = []
        self.served = False

    def serve(self) -> None:
        """Called once the engine serves. From now on lines may contain clients' text, so they are logged but are no
        evidence.

        Native code's errors are still read: native code cannot report a GPU that timed out in another way.
        """
        self.served = True
        self._causes.clear()
        self.lines.clear()

    @property
    def evidence(self) -> list[str]:
        """Lines that may say why the engine ended; none once it has served."""
        return [] if self.served else [*self._causes, *self.lines]

    @property
    def native(self) -> tuple[Fault, ...]:
        """Errors of native code since the engine has served."""
        return tuple(self._native)

    async def pump(self, stream: asyncio.StreamReader) -> None:
        """Reads `stream` to its end. A carriage return ends a line too: progress bars use it."""
        pending, begins = b"", True
        while chunk := await stream.read(65536):
            *whole, pending = re.split(rb"([\r\n]+)", pending + chunk)
            for line, ending in zip(whole[::2], whole[1::2], strict=True):
                self._take(line, begins)
                begins = ending.endswith(b"\n")
            if len(pending) > MAX_LINE:
                self._take(pending, begins)
                pending, begins = b"", False
        self._take(pending, begins)

    def _take(self, raw: bytes, begins: bool) -> None:
        """`begins`: this is a line's beginning, not the text after a carriage return or after MAX_LINE characters."""
        line = raw.decode("utf-8", "replace").rstrip()[:MAX_LINE]
        if not line:
            return
        self._on_line(level_of(line), line)
        if self.served:
            if begins and (match := _NATIVE.match(line)) and len(self._native) < KEPT_LINES:
                self._native.append(Fault("native code", line[match.end() :]))
            if not begins or line.startswith(_CLIENTS):
                return
        self.lines.append(line)
        text = _message(_PREFIX.sub("", line)).strip()
        if not _HARMLESS.match(line) and _CAUSE.match(text) and len(self._causes) < KEPT_LINES:
            self._causes[text] = None

    def errors(self, most: int = 3) -> list[str]:
        """The lines that most likely say why the engine ended: exceptions, else lines at error level, else the last
        lines.
        """
        if self._causes:
            return list(self._causes)[:most]
        bare = [_PREFIX.sub("", line) for line in self.lines]
        failing = [line for line in bare if level_of(line) in {"error", "critical"}]
        return (failing or bare)[-most:]


def level_of(line: str) -> str:
    """The log level that an engine's line states, in lower case; `info` where it states none."""
    match = _LEVEL.match(line)
    return match[1].lower() if match else "info"


def _message(line: str) -> str:
    """A vLLM log line without its `ERROR 11-29 21:39:27 [file.py:12] ` head; other lines as they are."""
    return re.sub(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ", "", line)
