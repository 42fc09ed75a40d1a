"""The engine's decisions on V100s, computed without one: `python -m engine.explain`, for `voltserve explain`.

It reads one JSON object from standard input and prints the choices as JSON. The object has the arguments of
`volta.explain`, and besides:

- `hybrid`: the model has recurrent layers.
- `recording_disabled`: no step is recorded.
- `matrix`: [rows, columns, group size] of a layer on one rank.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

from engine import triton_driver, volta
from engine.steps import recording
from engine.volta import Choice

V100_ARCH, V100_PROCESSORS = 70, 80
# Numbers of tokens at which a route may begin. Blocks of tokens (plan.h) change after powers of two and among the
# smallest numbers. cuBLAS starts after 768.
BEGINNINGS = (1, 2, 3, 4, 5, 9, 17, 33, 65, 129, 257, 513, 769, 1025, 2049)


def choose_routes(route: Callable[[int], str]) -> list[Choice]:
    """The kernel per number of tokens; adjacent numbers with one kernel are merged. `route`: "NAME: REASON"."""
    begins: list[tuple[int, str]] = []
    for tokens in BEGINNINGS:
        if not begins or begins[-1][1] != route(tokens):
            begins.append((tokens, route(tokens)))
    ends = [first - 1 for first, _ in begins[1:]]
    choices = []
    for (first, chosen), last in zip(begins, [*ends, None], strict=True):
        name, _, reason = chosen.partition(": ")
        if last is None:
            span = f"{first} tokens and more"
        else:
            span = f"{first} to {last} tokens" if last > first else f"{first} token{'s' * (first > 1)}"
        choices.append(Choice(f"kernel for {span}", name, reason))
    return choices


def main() -> None:
    """Reads, decides, prints."""
    given = json.load(sys.stdin)
    rows, columns, group_size = given.pop("matrix")
    choices = [
        *volta.explain(given),
        recording.choose(hybrid=given["hybrid"], disabled=given["recording_disabled"], gpu=True),
        volta.choose_launchers(triton_driver.compiler(os.environ)),
    ]
    import torch
    import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve

    of = torch.ops.voltserve._cuda_route
    choices += choose_routes(lambda tokens: of(tokens, rows, columns, group_size, V100_ARCH, V100_PROCESSORS))
    print(json.dumps([asdict(choice) for choice in choices]))


if __name__ == "__main__":
    main()
