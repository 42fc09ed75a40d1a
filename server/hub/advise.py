"""Which known checkpoints suit some V100s: context and speed as computed, the best first, and how to fetch each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.config.devices import V100, Devices
from server.config.presets import Match, Preset, load_presets
from server.errors import ConfigError
from server.hub.catalogue import UNKNOWN, Catalogue, Checkpoint
from server.plan import speed_of
from server.plan.cache import GPU_BLOCK
from server.plan.compare import Option, compare
from server.plan.memory import Device, Run
from server.plan.model import Model
from server.plan.settings import VISIBLE_SHARE
from server.plan.speed import Speed
from server.units import GIB

_FITS = re.compile(r"([1-9])x([1-9][0-9]?)")
_BATCHED = 2048  # tokens of a step, vLLM's default for such cards
SERVED, REPORTED, TOO_LARGE, REFUSED = "served", "reported", "too large", "refused"


@dataclass(frozen=True)
class Advice:
    """What is to be said of one checkpoint on these cards. `reason`: why it is not served, or not computed."""

    checkpoint: Checkpoint
    status: str
    reason: str = ""
    split: str = ""
    context: int = 0
    speed: Speed | None = None

    @property
    def command(self) -> str:
        """How to fetch it; "" where its name is not known exactly."""
        if not self.checkpoint.exact_name:
            return ""
        at = "" if self.checkpoint.revision == UNKNOWN else f"@{self.checkpoint.revision}"
        name = self.checkpoint.name
        return f"voltserve model fetch {name}{at} models/{name.rpartition('/')[2]}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = self.checkpoint
        return {
            "name": known.name,
            "status": self.status,
            "reason": self.reason,
            "split": self.split,
            "context_tokens": self.context or None,
            "speed": self.speed.as_dict() if self.speed else None,
            "size_gb": known.size_gb,
            "licence": known.licence,
            "quality": known.quality,
            "exact_name": known.exact_name,
            "notes": known.notes,
            "source": known.source,
            "command": self.command,
        }


@dataclass(frozen=True)
class Advised:
    """The advice for one kind of machine."""

    preset: Preset
    advice: tuple[Advice, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpus": self.preset.description,
            "preset": self.preset.name,
            "models": [one.as_dict() for one in self.advice],
        }

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"for {self.preset.description.partition(';')[0]} (preset {self.preset.name}); the best first.",
            "Context and speed are computed, for one stream of text; nothing was run on a V100. Sizes are as quoted.",
        ]
        for number, one in enumerate(self._of(SERVED), 1):
            lines += ["", *_served(number, one)]
        lines += self._reported()
        lines += self._by_reason(TOO_LARGE, "served, but too large for these cards:")
        lines += self._by_reason(REFUSED, "refused today:")
        return "\n".join(lines)

    def _of(self, status: str) -> list[Advice]:
        return [one for one in self.advice if one.status == status]

    def _reported(self) -> list[str]:
        found = self._of(REPORTED)
        lines = ["", "served; whether it fits is what others report, context and speed are unknown:"] if found else []
        for one in found:
            notes = f"; {one.checkpoint.notes}" if one.checkpoint.notes else ""
            lines.append(f"  {_named(one.checkpoint)}: {one.reason}{notes}")
            lines += [f"    {one.command}"] if one.command else []
        return lines

    def _by_reason(self, status: str, heading: str) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for one in self._of(status):
            by_reason.setdefault(one.reason, []).append(_named(one.checkpoint))
        lines = ["", heading] if by_reason else []
        return lines + [f"  {reason}: {', '.join(names)}" for reason, names in by_reason.items()]


def advise(catalogue: Catalogue, preset: Preset) -> Advised:
    """The advice for the cards of a preset."""
    order = (SERVED, REPORTED, TOO_LARGE, REFUSED)
    fits = {name: _fit(shape.model(), preset) for name, shape in catalogue.shapes.items()}
    found = [_judge(catalogue, checkpoint, preset, fits) for checkpoint in catalogue.checkpoints]
    return Advised(preset, tuple(sorted(found, key=lambda one: order.index(one.status))))


def preset_for(spec: str, devices: Devices | None = None) -> Preset:
    """The preset of cards given as 2x16g-pcie, or of those found. Raises ConfigError."""
    presets = {name: preset for name, preset in load_presets().items() if _is_plain(preset)}
    if not spec:
        return _found(presets, devices)
    names = {_spec(preset.match): preset for preset in presets.values() if preset.match}
    if spec not in names:
        raise ConfigError(f"--gpus: expected one of {', '.join(names)}, got {spec!r}")
    return names[spec]


def _is_plain(preset: Preset) -> bool:
    """Whether a preset is for V100s of one machine, and no variant."""
    return preset.match is not None and preset.match.capability == V100 and preset.extends is None


def _found(presets: Mapping[str, Preset], devices: Devices | None) -> Preset:
    gpus = devices.gpus if devices else ()
    usable = [preset for preset in presets.values() if preset.match and preset.match.within(gpus)]
    if not usable:
        known = ", ".join(_spec(preset.match) for preset in presets.values() if preset.match)
        raise ConfigError(f"no V100 is found here; say which cards are meant: --gpus with one of {known}")
    return max(usable, key=lambda preset: preset.match.worth if preset.match else (0, 0, False))


def _spec(match: Match) -> str:
    link = {None: "", True: "-sxm2", False: "-pcie"}[match.nvlink]
    return f"{match.count}x{match.memory_gib}g{link}"


@dataclass(frozen=True)
class _Fit:
    """How a shape fits some cards: the best split with its context and speed, or why none."""

    split: str = ""
    context: int = 0
    speed: Speed | None = None
    reason: str = ""


def _judge(catalogue: Catalogue, checkpoint: Checkpoint, preset: Preset, fits: Mapping[str, _Fit]) -> Advice:
    if refusal := catalogue.refusal(checkpoint):
        return Advice(checkpoint, REFUSED, refusal)
    if not checkpoint.shape:
        return _by_report(checkpoint, _match(preset))
    fit = fits[checkpoint.shape]
    status = TOO_LARGE if fit.reason else SERVED
    return Advice(checkpoint, status, fit.reason, fit.split, fit.context, fit.speed)


def _fit(model: Model, preset: Preset) -> _Fit:
    match = _match(preset)
    device = Device("gpu", int(match.memory_gib * GIB * VISIBLE_SHARE))
    options = compare(model, device, _run(preset))
    fitting = [option for option in options if option.works and option.split.gpus <= match.count]
    if not fitting:
        return _Fit(reason=_why(options, match.count))
    best = max(fitting, key=lambda option: (option.split.tensor, -option.split.pipeline))
    return _Fit(str(best.split), best.plan.length, speed_of(model, best.plan, match))


def _match(preset: Preset) -> Match:
    """The cards of a preset; preset_for chooses none without."""
    if preset.match is None:
        raise ConfigError(f"preset {preset.name}: expected one for GPUs")
    return preset.match


def _why(options: Sequence[Option], count: int) -> str:
    """Why none fits: what the widest split of these cards lacks."""
    widest = max((one for one in options if one.split.gpus <= count), key=lambda one: one.split.tensor)
    return widest.obstacle or widest.plan.problems[0].partition(":")[0]


def _run(preset: Preset) -> Run:
    """One stream with as long a context as fits, with the preset's share of a card."""
    share = preset.flags().get("gpu-memory-utilization", 0.9)
    return Run(
        length=0,
        sequences=1,
        batched=_BATCHED,
        in_flight=2 * _BATCHED,  # vLLM schedules a step while another computes
        utilization=float(str(share)),
        dtype_bytes=2,
        embedding_bytes=2,
        cache_dtype_bytes=2,
        form="packed",
        block_size=GPU_BLOCK,
    )


def _by_report(checkpoint: Checkpoint, match: Match) -> Advice:
    """By the cards that a checkpoint's sources name, since its shape is unknown."""
    reported = _FITS.fullmatch(checkpoint.fits)
    if reported is None:
        return Advice(checkpoint, REPORTED, "no source names its cards: ask `voltserve plan`")
    need = int(reported[1]) * int(reported[2])
    have = match.count * match.memory_gib
    said = f"reported to fit {reported[1]} × {reported[2]} GB"
    return Advice(checkpoint, REPORTED if have >= need else TOO_LARGE, said)


def _named(checkpoint: Checkpoint) -> str:
    return checkpoint.name + (f" ({checkpoint.size_gb:g} GB)" if checkpoint.size_gb else "")


def _served(number: int, one: Advice) -> list[str]:
    known = one.checkpoint
    size = f"{known.size_gb:g} GB" if known.size_gb else "size unknown"
    lines = [
        f"{number}. {known.name}: {size}, licence {known.licence}",
        f"   {one.split}: up to {one.context:,} tokens of context, {one.speed or 'speed unknown'}",
        f"   quality: {known.quality}",
    ]
    lines += [f"   note: {known.notes}"] if known.notes else []
    lines.append(f"   source: {known.source}")
    return [*lines, f"   {one.command}" if one.command else "   look its exact name up on the hub before fetching"]
