"""Fuses neighbouring small operations of a recorded step: the registry of patterns, and their application.

Between a decoding step's GEMMs lie operations that read very little. Each one is a launch during which the memory bus
is idle. `fuse` searches a recorded step (engine/steps/recording.py) for sequences that `voltserve_kernels` has as one
kernel, and replaces them. A sequence that differs in anything stays as it is, and the decision reports why.

engine/steps/pattern.py says what a pattern is and how to add one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.steps import fused_norm, fused_rotation, fused_silu
from engine.steps.pattern import Pattern
from engine.volta import Choice

if TYPE_CHECKING:
    from torch import fx

WHAT = "fused operations of a step"
WITHOUT_KERNELS = Choice(WHAT, "none", "voltserve_kernels is not installed, or was built without code for GPUs")

# In this order: a pattern that starts with an all-reduce comes last.
PATTERNS: tuple[Pattern, ...] = (fused_rotation.PATTERN, fused_silu.PATTERN, fused_norm.PATTERN)


def fuse(graph: "fx.Graph", patterns: Sequence[Pattern] = PATTERNS) -> Choice:
    """Applies every pattern to `graph`, and says what it did."""
    done = [(pattern.what, pattern.apply(graph)) for pattern in patterns]
    graph.lint()
    fused = [f"{what} ×{result.count}" for what, result in done if result.count]
    left = [f"{what}: {'; '.join(result.left)}" for what, result in done if result.left]
    return Choice(WHAT, ", ".join(fused) or "none", "; ".join(left) or "one kernel does what several did")
