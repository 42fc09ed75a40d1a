"""Calibration: second moments of every linear layer's inputs over a text, optionally weighted with gradients.

The 16-bit model runs in float32 on the CPU over windows of the text. For a layer with inputs x_t (one per token t) it
sums

    H = sum_t c_t x_t x_t^T          float32 [K, K]

Without gradients, c_t = 1. H is then GPTQ's Hessian of the layer's output error.

With gradients, c_t = mean_j g_tj^2. g_t is the loss's gradient with respect to the layer's output at token t. An
output error then counts in proportion to its effect on the loss. The gradient of weight [j, k] is sum_t g_tj x_tk. So
diag(H)_k is the squared gradient of column k's weights, averaged over rows. It is the saliency of QUASAR (arXiv
2608.13966), per input channel. Saliency per weight costs another GEMM as large as the layer, and chose no better scales
(docs/log.md). QUASAR keeps a moving average because training moves its weights. Ours stand still, so all windows weigh
the same.

The loss is taken on tokens drawn from the model's own distribution, not on the text's tokens. The expected squared
gradients are then the Fisher information: the second derivative of the KL divergence that quantizing should keep small.

Each window runs on one thread, because operations split over threads end in barriers (quant/parallel.py). Two lanes of
windows run at once, each with sums of its own. Sums are added in a fixed order, so the result does not depend on which
window ends first. Each lane saves its sums beside the output from time to time. A stopped run resumes after the last
saved window, and adds up the same numbers.
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

# Windows that run at once, each with its own sums. A constant, so that results do not depend on the number of cores.
LANES = 2

# Sums are saved again after this many times the duration of the last save.
_SAVE_INTERVAL = 20
_WINDOWS = "windows"  # the number that a lane has added up; no module has this name, since it holds no dot


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

    float32; the module's docstring defines H and what `gradients` changes. `kept` holds the windows of an unfinished
    run; the result is the same without it. Raises QuantError where the text is too short, the model does not run in
    transformers, or a module is missing.
    """
    windows = draw_windows(load_tokenizer(src), settings)
    tensors = open_checkpoint(src).tensors
    columns = [tensors[f"{module}.weight"].shape[1] for module in modules]
    model = load_model(src, beside=sums_bytes(columns, diagonal=diagonal))
    linears = _find(model, modules, src)
    _freeze(model, gradients=gradients)
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
    # On failure the lanes stop at their next layer, not after all their windows.
    first, *others = map_single_threaded(run, range(LANES), on_failure=sums.stop)
    for handle in handles:
        handle.remove()
    _add_to(first, others)
    if unreached := [name for name in modules if name not in first]:
        raise QuantError(
            f"{src}: {unreached[0]}: expected the calibration text to pass through it, got no input",
            "Use a method without calibration (mse, without compensation), or ignore this layer",
        )
    return first


def sums_bytes(columns: Sequence[int], *, diagonal: bool) -> int:
    """Bytes of all lanes' sums, for linears with these `columns`."""
    return sum(4 * (k if diagonal else k * k) for k in columns) * LANES


def lane_names() -> list[str]:
    """The names under which lanes keep their sums."""
    return [f"calibration.lane{lane}" for lane in range(LANES)]


def _kept_sums(kept: PartialResults | None, lane: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The number of windows that a lane has added up already, and its sums."""
    name = lane_names()[lane]
    if kept is None or name not in kept:
        return 0, {}
    sums = kept.load(name)
    return int(sums.pop(_WINDOWS)), sums


class _Keeper:
    """Saves a lane's sums: the last ones always, earlier ones as long as that costs at most 1/20 of the time."""

    def __init__(self, kept: PartialResults | None, lane: int) -> None:
        self._kept = kept
        self._name = lane_names()[lane]
        self._free_at = 0.0

    def keep(self, finished: int, sums: dict[str, torch.Tensor], *, last: bool) -> None:
        """Saves `sums` of `finished` windows, if a save is due."""
        began = time.monotonic()
        if self._kept is None or (began < self._free_at and not last):
            return
        self._kept.save(self._name, {_WINDOWS: torch.tensor(finished), **sums})
        ended = time.monotonic()
        self._free_at = ended + _SAVE_INTERVAL * (ended - began)


def draw_windows(tokenizer: Any, settings: CalibrationSettings) -> torch.Tensor:
    """int64 [windows, window_tokens]: pieces of the text, without overlap, in the text's order.

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
    """The sums that hooks on linears add up, separately per thread (lane)."""

    def __init__(self, *, diagonal: bool, gradients: bool) -> None:
        self._diagonal = diagonal
        self._gradients = gradients
        self._lane = threading.local()
        self._stopped = False

    def begin(self, sums: dict[str, torch.Tensor]) -> None:
        self._lane.sums = sums

    def stop(self) -> None:
        """Makes the next addition of every lane fail."""
        self._stopped = True

    def end(self) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = self._lane.sums
        return sums

    def hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        """A forward hook that adds to the sum of `name`: at once, or when the output's gradient arrives."""

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
    """The run has failed, and nothing waits for this lane."""


def _backward(model: torch.nn.Module, window: torch.Tensor, seed: int) -> None:
    """The gradients of one window's loss against tokens drawn from the model's own distribution."""
    logits = model(window[None]).logits[0].float()
    with torch.no_grad():
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()


def _freeze(model: Any, *, gradients: bool) -> None:
    """No gradients of weights. With `gradients`, those of activations are kept."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if gradients:
        # The weights are frozen, so an activation before the first layer must require gradients.
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def _add_to(sums: dict[str, torch.Tensor], others: Sequence[dict[str, torch.Tensor]]) -> None:
    for other in others:
        for name, tensor in other.items():
            sums[name] = sums[name] + tensor if name in sums else tensor


def _find(model: torch.nn.Module, modules: Sequence[str], src: Path) -> dict[str, torch.nn.Linear]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if missing := [name for name in modules if name not in found]:
        raise QuantError(
            f"{src}: {missing[0]}: expected a linear layer of this name in transformers' model, got none",
            "Use a method without calibration (mse, without compensation), or ignore this layer",
        )
    return {name: found[name] for name in modules}
