"""The engine's stdout and stderr: each line goes to our log at its own level, and the last ones are kept."""

import asyncio
import re
from collections import deque
from collections.abc import Callable

KEPT_LINES = 50
MAX_LINE = 4000  # characters; longer lines are cut, so that no output can exhaust our memory

_LEVEL = re.compile(r"^(?:\([^)]*\) *)*\W*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_PREFIX = re.compile(r"^(?:\([^)]*\) *)+")
# The last line of a traceback (`ValueError: …`, `torch.OutOfMemoryError: …`), the head of a native crash, a rank whose
# process ended, and the engine launcher's own account of how its processes ended.
_TELLING = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b(?::|$)|.*(?:Segfault encountered|Segmentation fault)"
    r"|Worker proc \S+ died|the engine died: "
)


class EngineOutput:
    """Collects the lines of one start of the engine."""

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        # Kept apart, since the root cause comes first and the tracebacks it leads to would push it out of `lines`.
        self._telling: dict[str, None] = {}

    async def pump(self, stream: asyncio.StreamReader) -> None:
        """Reads `stream` to its end. A carriage return ends a line too: progress bars use it."""
        pending = b""
        while chunk := await stream.read(65536):
            *whole, pending = re.split(rb"[\r\n]+", pending + chunk)
            for line in whole:
                self._take(line)
            if len(pending) > MAX_LINE:
                self._take(pending)
                pending = b""
        self._take(pending)

    def _take(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip()[:MAX_LINE]
        if not line:
            return
        self.lines.append(line)
        self._on_line(level_of(line), line)
        text = _message(_PREFIX.sub("", line)).strip()
        if _TELLING.match(text) and len(self._telling) < KEPT_LINES:
            self._telling[text] = None

    def errors(self, most: int = 3) -> list[str]:
        """The lines that most likely say why the engine ended: exceptions, else lines at error level, else the last."""
        if self._telling:
            return list(self._telling)[:most]
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
