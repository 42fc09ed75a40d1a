"""The memory plan: what a model needs on a device, whether it fits, and over how many GPUs to spread it.

Arithmetic over config.json, safetensors headers and the engine's flags; nothing is loaded and no GPU is touched.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.config.devices import V100
from server.config.modalities import is_text_only
from server.config.presets import Match, find_preset, load_presets
from server.config.settings import Config
from server.decisions import Decision
from server.plan import report
from server.plan.compare import Option, compare, recommend
from server.plan.memory import Plan
from server.plan.model import Model, NotPlannedError, read_model, text_only
from server.plan.nodes import Nodes, lay_over_nodes, obstacle
from server.plan.quantized import as_nvfp4
from server.plan.settings import device_of, run_of, split_of
from server.plan.speed import Speed, estimate

__all__ = ["NotPlannedError", "Planned", "plan_for"]


@dataclass(frozen=True)
class Planned:
    """The plan of a configuration; `options` and `decision` compare splits, and are absent without GPUs.

    `nodes` is there where Ray finds places for the pipeline stages: each is then taken for a machine of its own.
    """

    model: Model
    plan: Plan
    options: tuple[Option, ...]
    decision: Decision | None
    nodes: Nodes | None
    quantized: bool = False
    speed: Speed | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = {"as": "nvfp4"} if self.quantized else {}
        speed = {"speed": self.speed.as_dict()} if self.speed else {}
        return {**made, **report.as_dict(self.model, self.plan, self.options, self.decision, self.nodes), **speed}

    def as_text(self) -> str:
        """For people."""
        made = "once it is made NVFP4 by `voltserve quantize`:\n" if self.quantized else ""
        speed = self.speed.as_text() if self.speed else ""
        return made + report.as_text(self.model, self.plan, self.options, self.decision, self.nodes, speed)


def plan_for(config: Config, *, quantized: bool = False) -> Planned:
    """The plan of what `serve` would start, or with `quantized` of what it would once the 16-bit model is in NVFP4.

    Raises:
        UserError: `quantized` is asked for of a model that is so already.
        QuantError: the model's files are missing or broken.
        NotPlannedError: a kind of model whose memory is not computed here.
    """
    preset = find_preset(config.preset, load_presets())
    model = read_model(Path(config.model))
    if quantized:
        model = as_nvfp4(model)
    if is_text_only(config.engine):
        model = text_only(model)
    device = device_of(config, preset)
    split = split_of(config.engine)
    run = run_of(config, model, device, split)
    asked = compare(model, device, run, (split,))[0]
    plan = asked.plan
    obstacles = tuple(filter(None, (asked.obstacle, obstacle(model, split))))
    plan = replace(plan, problems=(*obstacles, *plan.problems))
    nodes = lay_over_nodes(model, plan) if config.over_ray and split.pipeline > 1 and not obstacles else None
    if preset.match is None:
        return Planned(model, plan, (), None, nodes, quantized)
    options = compare(model, device, run)
    gpus = (len(config.devices.gpus) or preset.match.count) * (split.pipeline if config.over_ray else 1)
    speed = speed_of(model, plan, preset.match)
    return Planned(model, plan, options, recommend(options, gpus), nodes, quantized, speed)


def speed_of(model: Model, plan: Plan, match: Match) -> Speed | None:
    """The computed speed of a plan that fits V100s; None on other cards."""
    if match.capability != V100 or not plan.fits:
        return None
    return estimate(model, plan.split, "sxm2" if match.nvlink else "pcie")
