"""A plan for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from server.decisions import Decision
from server.plan.agreement import Row
from server.plan.compare import Option, as_row
from server.plan.memory import Item, Plan, gib
from server.plan.model import Model
from server.plan.nodes import Nodes

_VISION = (
    "not in this sum: the engine runs the largest image through the vision encoder before it sizes the cache; "
    "--language-model-only spares that, and the encoder's weights, where only text is needed"
)
_HEADINGS = ("split", "weights/GPU", "cache/GPU", "tokens", "seqs", "")


def as_dict(
    model: Model, plan: Plan, options: Sequence[Option], decision: Decision | None, nodes: Nodes | None
) -> dict[str, Any]:
    """Every number in bytes or tokens, with its formula."""
    cache, run = plan.cache, plan.run
    return {
        "model": _model_as_dict(model),
        "split": {"tensor": plan.split.tensor, "pipeline": plan.split.pipeline},
        "device": asdict(plan.device),
        "run": asdict(run),
        "budget": _budget_as_dict(plan),
        "items": [asdict(item) for item in plan.items],
        "outside": [asdict(item) for item in plan.outside],
        "load_peak": asdict(plan.load_peak),
        "cache": {
            "bytes": plan.cache_bytes,
            "tokens": plan.tokens,
            "tokens_formula": f"⌊{plan.cache_bytes} B / {cache.block_bytes} B⌋ blocks / "
            f"blocks of a sequence of {plan.length} tokens · {plan.length}",
            "block_size": cache.block_size,
            "blocks": cache.blocks(plan.cache_bytes),
            "block_bytes": cache.block_bytes,
            "block_bytes_formula": f"{cache.block_size} tokens · {cache.token_bytes} B · {cache.pools} layers",
            "token_bytes_per_layer": cache.token_bytes,
            "token_bytes_per_layer_formula": f"2 · KV heads of a rank · {model.head_dim} · {run.cache_dtype_bytes} B",
            "state_bytes_per_sequence_and_layer": cache.state_bytes,
            "groups": asdict(cache.groups),
        },
        "max_model_len": plan.length,
        "sequences_of_max_model_len": plan.together,
        "longest_for_max_num_seqs": plan.longest,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "notes": notes(model),
        "options": [_option_as_dict(option) for option in options],
        "decision": asdict(decision) if decision else None,
        "nodes": nodes.as_dict() if nodes else None,
    }


def _linears(model: Model) -> str:
    eights = sum(linear.kind.element == "E4M3" for linear in model.linears)
    return f"{len(model.linears) - eights} linears in 4 bits" + (f" and {eights} in 8" if eights else "")


def as_text(
    model: Model,
    plan: Plan,
    options: Sequence[Option],
    decision: Decision | None,
    nodes: Nodes | None,
    speed: str = "",
) -> str:
    """The same for people."""
    run, cache = plan.run, plan.cache
    place = "GPU" if plan.device.kind == "gpu" else "this machine"
    kinds = ", ".join(f"{model.kinds.count(kind)} {kind}" for kind in dict.fromkeys(model.kinds))
    lines = [
        f"{model.architecture}: {len(model.kinds)} layers ({kinds}), {_linears(model)}; "
        f"per {place} with {plan.split}, of {gib(plan.device.memory_bytes)}:"
    ]
    lines += _table([_item_row(item) for item in (*plan.items, _cache_item(plan))])
    used = sum(item.bytes for item in plan.items) + plan.cache_bytes
    lines.append(f"  = {gib(used)} of {gib(plan.budget_bytes)}")
    if plan.outside:
        lines.append(f"beside that share (--gpu-memory-utilization {run.utilization:g}):")
        lines += _table([_item_row(item) for item in plan.outside])
    lines.append(f"load-time peak: {gib(plan.load_peak.bytes)} ({plan.load_peak.formula})")
    lines.append(
        f"cache: {plan.tokens:,} tokens in blocks of {cache.block_size}; {plan.together} sequences of "
        f"{plan.length:,} tokens at once, or {run.sequences} of {plan.longest:,}"
    )
    if options:
        lines.append("splits over GPUs of this kind:")
        lines += _table([_HEADINGS, *(as_row(option) for option in options)])
    if decision:
        lines.append(f"{decision}")
    if nodes:
        machines, network = nodes.as_rows()
        lines += ["machines, one per pipeline stage:", *_table(machines)]
        lines += [f"over the network, {nodes.token_bytes:,} B a token ({nodes.formula}):", *_table(network)]
    lines += [speed] if speed else []
    lines += [f"note: {note}" for note in notes(model)]
    lines += [f"does not fit: {problem}" for problem in plan.problems] or ["fits."]
    return "\n".join(lines)


def _model_as_dict(model: Model) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "layers": {kind: model.kinds.count(kind) for kind in ("full", "sliding", "linear")},
        "quantized_linears": len(model.linears),
        "positions": model.positions,
    }


def _budget_as_dict(plan: Plan) -> dict[str, Any]:
    on_gpu = plan.device.kind == "gpu"
    share = f"{plan.device.memory_bytes} B · {plan.run.utilization:g}"
    return {"bytes": plan.budget_bytes, "formula": share if on_gpu else "memory available on this machine"}


def _option_as_dict(option: Option) -> dict[str, Any]:
    plan = option.plan
    return {
        "split": str(option.split),
        "fits": plan.fits,
        "obstacle": option.obstacle,
        "weights_bytes": sum(item.bytes for item in plan.items[:2]),
        "cache_bytes": plan.cache_bytes,
        "cache_tokens": plan.tokens,
        "sequences_of_max_model_len": plan.together,
        "problems": list(plan.problems),
    }


def notes(model: Model) -> list[str]:
    """What the plan, or the engine, leaves out for this model."""
    spared = f"{gib(model.left_out_bytes)} of weights over all GPUs, and a trial run on the largest image"
    left_out = [f"the image encoder is not loaded, which spares {spared}"] if model.left_out_bytes else []
    return ([_VISION] if model.vision else []) + left_out


def _item_row(item: Item) -> tuple[str, ...]:
    return (item.name, gib(item.bytes), item.formula + ("" if item.basis == "computed" else " (stated)"))


def _cache_item(plan: Plan) -> Item:
    how = "as configured" if plan.run.cache_bytes else "what is left"
    return Item("key/value cache", plan.cache_bytes, how, "computed")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def agreement_text(rows: Sequence[Row]) -> str:
    """The plan beside what an engine reported, for people."""
    lines = [f"{'figure':<16} {'planned':>16} {'reported':>16} {'off':>8}"]
    for row in rows:
        figures = f"{row.name:<16} {row.planned:>16,.0f} {row.reported:>16,.0f} {row.off:>+8.2%}"
        lines.append(figures if row.agrees else f"{figures}  too far")
    return "\n".join(lines)
