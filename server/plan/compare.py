"""Compares the ways to split a model over GPUs of one kind, and recommends one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.verify.tensor_parallel import obstacles
from server.decisions import Decision
from server.plan.memory import Device, Plan, Run, gib, make_plan
from server.plan.model import Model
from server.plan.weights import Split

SPLITS = (Split(1), Split(2), Split(4), Split(1, 2), Split(1, 4))


@dataclass(frozen=True)
class Option:
    """One split. `obstacle` says why its layers cannot be cut that way, and is empty where they can."""

    split: Split
    plan: Plan
    obstacle: str

    @property
    def works(self) -> bool:
        """Whether it can be cut and fits."""
        return self.plan.fits and not self.obstacle


def compare(model: Model, device: Device, run: Run, splits: Sequence[Split] = SPLITS) -> tuple[Option, ...]:
    """Every split on cards like `device`."""
    blocked = _obstacles(model)
    return tuple(Option(split, make_plan(model, device, run, split), blocked.get(split.tensor, "")) for split in splits)


def recommend(options: Sequence[Option], gpus: int) -> Decision:
    """The split to take on `gpus` cards, and why: the fewest cards, and tensor before pipeline parallelism."""
    usable = [option for option in options if option.works and option.split.gpus <= gpus]
    if not usable:
        fitting = [option for option in options if option.works]
        if fitting:
            needed = f"it needs {min(option.split.gpus for option in fitting)} such GPUs"
        elif all(option.plan.short_of_memory for option in options if not option.obstacle):
            needed = "it needs a larger card"
        else:
            needed = next(option.plan.problems[0] for option in options if not option.obstacle and option.plan.problems)
        return Decision("split", "none", f"the model does not fit {gpus} of these GPUs; {needed}")
    best = min(usable, key=lambda option: (option.split.gpus, option.split.pipeline))
    if best.split.gpus == 1:
        more = "; other cards can each run a copy" if gpus > 1 else ""
        return Decision("split", str(best.split), f"the model fits one card, so no token waits for an all-reduce{more}")
    if best.split.pipeline == 1:
        return Decision(
            "split",
            str(best.split),
            "the fewest cards that hold the model; with tensor parallelism all of them read weights for each token, "
            "with pipeline parallelism one after the other",
        )
    tensor = next(option for option in options if option.split == Split(best.split.gpus))
    return Decision("split", str(best.split), tensor.obstacle or f"TP={best.split.gpus} does not fit")


def _obstacles(model: Model) -> Mapping[int, str]:
    """The first obstacle of each tensor-parallel size."""
    linears = {linear.name: (linear.rows, linear.columns, linear.kind.column_multiple) for linear in model.linears}
    heads = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads}
    found = obstacles(linears, heads)
    return {size: str(problems[0]) for size, problems in found.items() if problems}


def as_row(option: Option) -> tuple[str, ...]:
    """A line of the table: split, weights, cache, tokens, sequences together, verdict."""
    plan = option.plan
    weights = sum(item.bytes for item in plan.items[:2])
    verdict = option.obstacle or (plan.problems[0] if plan.problems else "fits")
    numbers = (gib(plan.cache_bytes), f"{plan.tokens:,}", f"{plan.together}") if option.works else ("-", "-", "-")
    return (str(option.split), gib(weights), *numbers, verdict)
