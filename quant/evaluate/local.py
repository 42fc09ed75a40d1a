"""A model directory, 16-bit, NVFP4 or FP8 in any format read here, run by transformers on the CPU in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.blockwise import quantize_matrix
from quant.errors import QuantError
from quant.formats import fp8, fp8_linear
from quant.formats.detect import detect
from quant.formats.linear import read_linear
from quant.formats.scheme import Scheme
from quant.safetensors_file import Checkpoint, open_checkpoint
from quant.tensor import FP8Tensor, NVFP4Tensor
from quant.transformers_model import load_model, load_tokenizer, model_from_tensors


@dataclass(frozen=True)
class LocalModel:
    """A model ready to run. `name` for reports; `model` and `tokenizer` are transformers'."""

    name: str
    model: Any
    tokenizer: Any

    def log_probabilities(self, window: torch.Tensor) -> torch.Tensor:
        """float32 [T, V]: log-probabilities of every possible next token, after each token of `window` (int64 [T])."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(window[None]).logits[0]
        return logits.float().log_softmax(-1)

    def encode(self, text: str) -> torch.Tensor:
        """int64 [T]."""
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)

    def score(self, prompt: str, continuation: str) -> float:
        """The total log-probability, in nats, of the tokens that `continuation` adds to `prompt`.

        If the prompt is tokenized differently when both are joined, counting begins at the first different token.
        """
        before, whole = self.encode(prompt), self.encode(prompt + continuation)
        shared = 0
        while shared < min(len(before), len(whole) - 1) and before[shared] == whole[shared]:
            shared += 1
        first = max(shared, 1)
        scores = self.log_probabilities(whole)[first - 1 : -1]
        return float(scores.gather(-1, whole[first:, None]).sum())

    def generate(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of `prompt`, at most `tokens` tokens long."""
        ids = self.encode(prompt)[None]
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,  # one prompt needs no padding, but transformers warns if this is not set
            )
        text: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def load_local(directory: Path, *, quantize_activations: bool = False) -> LocalModel:
    """Loads `directory`. NVFP4 and FP8 weights are dequantized exactly, one linear at a time.

    `quantize_activations` emulates W4A4 (see `emulate_w4a4`) on the NVFP4 linears. Raises QuantError for a model
    that cannot be read, and for that option on one that is not quantized.
    """
    scheme = detect(directory)
    if scheme is None:
        if quantize_activations:
            raise QuantError(f"{directory}: expected an NVFP4 model for W4A4, got a 16-bit one", "Quantize it first")
        return LocalModel(str(directory), load_model(directory), load_tokenizer(directory))
    if scheme.pre_quant_scale:
        raise QuantError(
            f"{directory}: expected inputs as they are, got AWQ's pre_quant_scale", "Evaluate it on a server"
        )
    checkpoint = open_checkpoint(directory)
    tensors, linears = dequantized(checkpoint, scheme)
    model = model_from_tensors(directory, tensors)
    if quantize_activations:
        for name in linears:
            model.get_submodule(name).register_forward_pre_hook(emulate_w4a4(scheme.group_size))
    return LocalModel(str(directory), model, load_tokenizer(directory))


def dequantized(checkpoint: Checkpoint, scheme: Scheme) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All tensors of `checkpoint` as a 16-bit model would hold them, in float32, and the names of NVFP4 linears."""
    layout = scheme.layout
    parts = _parts(checkpoint, scheme)
    found: dict[str, dict[str, torch.Tensor]] = {linear: {} for linear in parts}
    tensors = {}
    for shard in checkpoint.shards:
        for name, tensor in checkpoint.read(shard, checkpoint.names(shard)):
            linear, _, suffix = name.rpartition(".")
            if linear not in found:
                tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
            elif suffix in parts[linear]:
                found[linear][suffix] = tensor
                if len(found[linear]) == len(parts[linear]):
                    tensors[f"{linear}.weight"] = _read(scheme, found.pop(linear), linear).dequantize()
                    found[linear] = {}
            elif suffix == "bias":
                tensors[name] = tensor.float()
    return tensors, [linear for linear, own in parts.items() if layout.codes in own and layout.global_scale in own]


def _parts(checkpoint: Checkpoint, scheme: Scheme) -> dict[str, tuple[str, ...]]:
    """Each quantized linear, and the suffixes of the tensors that its weights are made of."""
    layout = scheme.layout
    parts: dict[str, tuple[str, ...]] = {}
    for name in checkpoint.tensors:
        linear, _, suffix = name.rpartition(".")
        if suffix not in (layout.scales, *fp8.SCALES):
            continue
        weight = checkpoint.tensors.get(f"{linear}.{fp8.WEIGHT}")
        is_fp8 = weight is not None and weight.dtype == torch.float8_e4m3fn
        parts[linear] = (fp8.WEIGHT, suffix) if is_fp8 else (layout.codes, layout.scales, layout.global_scale)
    return parts


def _read(scheme: Scheme, tensors: dict[str, torch.Tensor], linear: str) -> NVFP4Tensor | FP8Tensor:
    if fp8.WEIGHT in tensors and tensors[fp8.WEIGHT].dtype == torch.float8_e4m3fn:
        return fp8_linear.read_linear(tensors, linear)
    return read_linear(scheme.layout, tensors, linear, scheme.group_size)


def emulate_w4a4(group_size: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor]]:
    """A forward pre-hook that rounds a linear's input as W4A4 engines do on Blackwell: to NVFP4, dynamically.

    Each token's vector is cut into groups, each with an E4M3 scale of max / 6. The call's largest input sets the global
    scale. For comparison only: Volta has no 4-bit arithmetic, and never does this (docs/architecture.md).
    """

    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        rows = inputs[0].detach().flatten(0, -2)
        return (quantize_matrix(rows, policy="maxabs", group_size=group_size).dequantize().view_as(inputs[0]),)

    return hook
