"""An engine whose CUDA graphs compute something else than its eager steps, to see that the start-up check notices.

Given as `--worker-extension-cls trials.faulty.FaultyGraphs`.
"""

import torch

from engine.steps.graph_check import GraphSwitch

FACTOR = 1.5


class FaultyGraphs(GraphSwitch):
    """Scales the final norm's weight, which both ways read, exactly while graphs are on."""

    _right: torch.Tensor | None = None

    def voltserve_replay(self, wanted: bool) -> None:
        """As the original, and breaks or mends the weight."""
        super().voltserve_replay(wanted)
        weight = self.model_runner.get_model().model.norm.weight.data
        if self._right is None:
            self._right = weight.clone()
        weight.copy_(self._right * (FACTOR if wanted else 1))
