"""What a check on a GPU found, and its result file. Every gpu_check*.py uses this."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

PRINTED = 8000  # characters of a result


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options that every check has; `text`: its module's docstring."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="where the result is written as JSON")
    return made


class Findings:
    """Cases, the worst error of each kind as a share of what is allowed, and what failed."""

    def __init__(self) -> None:
        self.cases = 0
        self.worst: dict[str, float] = {}
        self.failures: list[str] = []
        self._began = time.monotonic()

    def expect(self, kind: str, what: str, holds: bool) -> None:
        """Counts a case that either holds or fails; `what` names the failure."""
        self.cases += 1
        if not holds:
            self.failures.append(f"{kind} {what}")

    def within(self, kind: str, what: str, share: float, detail: str) -> None:
        """Counts a case whose largest error is `share` of what is allowed, at `detail`. More than 1, or NaN, fails."""
        share = math.inf if math.isnan(share) else share
        self.worst[kind] = max(self.worst.get(kind, 0.0), share)
        self.expect(kind, f"{what}: {share:.3g} of the allowed error at {detail}", share <= 1)

    def all_within(self, kind: str, what: str, shares: torch.Tensor) -> None:
        """As within(), with one error per element. NaN counts as infinite."""
        shares = shares.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if not shares.numel():
            return self.within(kind, what, 0.0, "no element")
        at = [int(i) for i in torch.unravel_index(shares.argmax(), shares.shape)]
        return self.within(kind, what, float(shares.max()), str(at))

    def finish(self, what: str, output: Path | None, **more: Any) -> int:
        """Prints the result and writes it to `output`; returns the exit status, 1 if anything failed."""
        torch.cuda.synchronize()
        result = {
            "what": what,
            "provenance": "measured",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": " ".join(sys.argv),
            "cases": self.cases,
            "worst_error_of_allowed": {kind: round(share, 4) for kind, share in sorted(self.worst.items())},
            "failures": self.failures,
            **more,
            "seconds": round(time.monotonic() - self._began, 1),
        }
        text = json.dumps(result, indent=1)
        print(text[:PRINTED])
        if output:
            output.write_text(text + "\n")
        return 1 if self.failures else 0
