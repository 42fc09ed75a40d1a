"""What calibration text says about a model: for every linear layer, how its inputs move together and how much they
matter.

The 16-bit model runs in float32 on the CPU over windows of the text. For a layer with inputs x_t (one a token t) it
gathers

    H = sum_t c_t x_t x_t^T          float32 [K, K]

Without gradients c_t = 1: GPTQ's Hessian of the layer's output error. With gradients c_t = mean_j g_tj^2, where g_t
is the loss's gradient with respect to the layer's output at token t: an output error then counts as far as the loss
notices it. The gradient with respect to weight [j, k] is sum_t g_tj x_tk, so diag(H)_k is the squared gradient that
column k's weights receive, averaged over rows: the saliency of QUASAR (arXiv 2608.13966), by input channel. By single
weight it costs another product as large as the layer, and chose no better scales (docs/log.md). QUASAR follows its
saliency with a moving average because training moves its weights; ours stand still, so all windows weigh the same.

The loss is that of tokens drawn from the model's own distribution rather than the text's: the expected squared
gradients are then the Fisher information, the second derivative of the KL divergence that quantizing should keep
small.

Windows run on one thread each: operations split over threads would end in barriers (quant/parallel.py). The sums are
taken in a fixed order, so the result does not depend on which window ends first. Each lane keeps its sums beside the
output now and then; a run that was stopped goes on after the last window kept, and adds up the same numbers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.parallel import map_single_threaded
from quant.partial import PartialResults
from quant.progress import OnProgress, Progress, ignore_progress
from quant.safetensors_file import open_checkpoint
from quant.transformers_model import load_model, load_tokenizer

# Windows run at once, each with sums of its own: the results do not depend on how many cores a machine has.
LANES = 2

# Sums are kept when the time since they last were is this many times what keeping them took.
_KEEPING_SHARE = 20
_WINDOWS = "windows"  # how many a lane has added up; no module has this name, which holds no dot


@dataclass(frozen=True)
class CalibrationSettings:
    """`windows` pieces of `window_tokens` tokens, drawn from `text` with `seed`."""

    text: Text
    windows: int = 16
    window_tokens: int = 512
    seed: int = 0


def calibrate(
    src: Path,
    modules: Sequence[str],
    settings: CalibrationSettings,
    *,
    gradients: bool,
    diagonal: bool,
    kept: PartialResults | None = None,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, torch.Tensor]:
    """H of each of `modules` (names of linears of the model directory `src`), or its diagonal [K] if `diagonal`.

    float32; the module's docstring defines H and what `gradients` changes. `kept` is where an unfinished run finds its
    windows again; the result is the same without. Raises QuantError when the text is too
    short, the model does not run in transformers or has none of a module.
    """
    windows = draw_windows(load_tokenizer(src), settings)
    tensors = open_checkpoint(src).tensors
    columns = [tensors[f"{module}.weight"].shape[1] for module in modules]
    model = load_model(src, beside=sums_bytes(columns, diagonal=diagonal))
    linears = _find(model, modules, src)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if gradients:
        # With frozen weights something before the first layer has to ask for gradients.
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    sums = _Sums(diagonal=diagonal, gradients=gradients)
    handles = [linear.register_forward_hook(sums.hook(name)) for name, linear in linears.items()]
    begun = [_kept_sums(kept, lane) for lane in range(LANES)]
    done = sum(finished for finished, _ in begun)
    lock = threading.Lock()

    def run(lane: int) -> dict[str, torch.Tensor]:
        nonlocal done
        finished, found = begun[lane]
        sums.begin(found)
        keeper = _Keeper(kept, lane)
        mine = range(lane, len(windows), LANES)
        for index in mine[finished:]:
            if gradients:
                _backward(model, windows[index], settings.seed * len(windows) + index)
            else:
                with torch.no_grad():
                    model(windows[index][None], logits_to_keep=1)
            finished += 1
            keeper.keep(finished, sums.end(), last=finished == len(mine))
            with lock:
                done += 1
                on_progress(Progress("calibrating", done, len(windows), "windows"))
        return sums.end()

    on_progress(Progress("calibrating", done, len(windows), "windows"))
    # Stopped, the lanes end at their next layer, and not after all their windows.
    first, *others = map_single_threaded(run, range(LANES), on_failure=sums.stop)
    for handle in handles:
        handle.remove()
    for other in others:
        for name, tensor in other.items():
            first[name] = first[name] + tensor if name in first else tensor
    if unreached := [name for name in modules if name not in first]:
        raise QuantError(
            f"{src}: {unreached[0]}: expected the calibration text to pass through it, got no input",
            "Use a method without calibration (mse, without compensation), or ignore this layer",
        )
    return first


def sums_bytes(columns: Sequence[int], *, diagonal: bool) -> int:
    """What the sums of linears with so many `columns` take while the lanes run."""
    return sum(4 * (k if diagonal else k * k) for k in columns) * LANES


def lane_names() -> list[str]:
    """The names under which lanes keep their sums."""
    return [f"calibration.lane{lane}" for lane in range(LANES)]


def _kept_sums(kept: PartialResults | None, lane: int) -> tuple[int, dict[str, torch.Tensor]]:
    """How many windows of a lane are added up already, and the sums."""
    name = lane_names()[lane]
    if kept is None or name not in kept:
        return 0, {}
    sums = kept.load(name)
    return int(sums.pop(_WINDOWS)), sums


class _Keeper:
    """Keeps a lane's sums: its last ones always, others as often as costs a twentieth of the time."""

    def __init__(self, kept: PartialResults | None, lane: int) -> None:
        self._kept = kept
        self._name = lane_names()[lane]
        self._free_at = 0.0

    def keep(self, finished: int, sums: dict[str, torch.Tensor], *, last: bool) -> None:
        """Keeps `sums` of `finished` windows, if it is time."""
        began = time.monotonic()
        if self._kept is None or (began < self._free_at and not last):
            return
        self._kept.save(self._name, {_WINDOWS: torch.tensor(finished), **sums})
        ended = time.monotonic()
        self._free_at = ended + _KEEPING_SHARE * (ended - began)


def draw_windows(tokenizer: Any, settings: CalibrationSettings) -> torch.Tensor:
    """int64 [windows, window_tokens]: pieces of the text that do not overlap, in its order.

    Raises QuantError when the text is too short.
    """
    ids = torch.tensor(tokenizer(settings.text.content, verbose=False)["input_ids"])
    available = len(ids) // settings.window_tokens
    if available < settings.windows:
        raise QuantError(
            f"{settings.text.source}: expected {settings.windows} windows of {settings.window_tokens} tokens, "
            f"got {len(ids)} tokens",
            "Name a longer text, or fewer windows",
        )
    generator = torch.Generator().manual_seed(settings.seed)
    picked = torch.randperm(available, generator=generator)[: settings.windows].sort().values
    return ids[: available * settings.window_tokens].view(available, settings.window_tokens)[picked]


class _Sums:
    """What hooks on linears add up, apart for each thread (lane)."""

    def __init__(self, *, diagonal: bool, gradients: bool) -> None:
        self._diagonal = diagonal
        self._gradients = gradients
        self._lane = threading.local()
        self._stopped = False

    def begin(self, sums: dict[str, torch.Tensor]) -> None:
        self._lane.sums = sums

    def stop(self) -> None:
        """Lets the lanes' next addition fail."""
        self._stopped = True

    def end(self) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = self._lane.sums
        return sums

    def hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        """A forward hook that adds to the sum of `name`: now, or when the gradient of the output comes."""

        def on_forward(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            rows = inputs[0].detach().flatten(0, -2)
            if self._gradients:
                output.register_hook(lambda gradient: self._add(name, rows, gradient.flatten(0, -2)))
            else:
                self._add(name, rows, None)

        return on_forward

    def _add(self, name: str, rows: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if self._stopped:
            raise _StoppedError
        weights = None if gradient is None else gradient.detach().square().mean(-1, keepdim=True)
        weighted = rows if weights is None else rows * weights
        term = (weighted * rows).sum(0) if self._diagonal else weighted.t() @ rows
        sums = self._lane.sums
        sums[name] = sums[name].add_(term) if name in sums else term


class _StoppedError(Exception):
    """The run ends; nobody waits for this lane."""


def _backward(model: torch.nn.Module, window: torch.Tensor, seed: int) -> None:
    """The gradients of one window's loss against tokens drawn from the model's own distribution."""
    logits = model(window[None]).logits[0].float()
    with torch.no_grad():
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()


def _find(model: torch.nn.Module, modules: Sequence[str], src: Path) -> dict[str, torch.nn.Linear]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if missing := [name for name in modules if name not in found]:
        raise QuantError(
            f"{src}: {missing[0]}: expected a linear layer of this name in transformers' model, got none",
            "Use a method without calibration (mse, without compensation), or ignore this layer",
        )
    return {name: found[name] for name in modules}
