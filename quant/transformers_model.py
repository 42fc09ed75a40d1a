"""A 16-bit model directory as transformers' model, in float32 on the CPU, for calibration and evaluation."""

import os
from pathlib import Path
from typing import Any

import torch

from quant.constants import GENERATION_CONFIG
from quant.errors import QuantError
from quant.safetensors_file import open_checkpoint
from quant.verify.experts import EXPERT, PROJECTIONS

_REMEDY = "Check that transformers knows this architecture, and that the directory is complete"
_FLOAT32_BYTES = 4


def load_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer. Raises QuantError when transformers cannot make it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise QuantError(f"{directory}: expected a tokenizer, got: {error}", _REMEDY) from None


def load_model(directory: Path, beside: int = 0) -> Any:
    """The causal language model in `directory`, for inference (dropout off), in float32.

    Raises QuantError when transformers cannot make it, or memory is too small for its weights and `beside` more bytes.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    refuse_too_large(directory, beside)
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise QuantError(f"{directory}: expected a model, got: {error}", _REMEDY) from None
    return model.eval()


def refuse_too_large(directory: Path, beside: int) -> None:
    """Raises QuantError when the float32 weights of `directory` and `beside` more bytes exceed the free memory."""
    elements = sum(info.nbytes // info.dtype.itemsize for info in open_checkpoint(directory).tensors.values())
    needed, free = elements * _FLOAT32_BYTES + beside, available_memory()
    if needed > free:
        raise QuantError(
            f"{directory}: expected {needed / 1e9:.1f} GB free to run the model in float32, got {free / 1e9:.1f} GB",
            "Use a machine with more, or a quantization method that runs no model (mse, without compensation)",
        )


def available_memory() -> int:
    """Bytes that can be allocated without swapping: Linux's MemAvailable, elsewhere all physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def model_from_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """The causal language model that `directory`/config.json describes, with `tensors` (float32) for its weights.

    Raises QuantError when transformers cannot make it, or a weight is missing or not the model's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tensors = fuse_experts(tensors)
    try:
        config = AutoConfig.from_pretrained(directory)
        # The weights are dequantized already.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (directory / GENERATION_CONFIG).exists():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        loaded = model.load_state_dict(tensors, strict=False, assign=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise QuantError(f"{directory}: expected a model, got: {error}", _REMEDY) from None
    model.tie_weights()
    given = {parameter.data_ptr() for name, parameter in model.named_parameters() if name in tensors}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in loaded.missing_keys if parameters[name].data_ptr() not in given]
    for what, names in (("is missing", missing), ("is not one of the model's", loaded.unexpected_keys)):
        if names:
            raise QuantError(f"{directory}: {names[0]} {what} as transformers builds it", _REMEDY)
    return model.eval()


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` under transformers 5's names, with a layer's experts stacked into two tensors.

    They are `mlp.experts.gate_up_proj` [E, 2 I, H], gate's rows before up's, and `mlp.experts.down_proj` [E, H, I].
    Mixtral's `block_sparse_moe` becomes `mlp` too.
    """
    fused: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.match(name.removesuffix(".weight")):
            layers.setdefault(match["layer"], {})[int(match["number"]), match["leaf"]] = tensor
        else:
            fused[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for layer, parts in layers.items():
        gate, down, up = next(names for names in PROJECTIONS if {leaf for _, leaf in parts} <= {*names})
        numbers = sorted({number for number, _ in parts})
        if missing := [
            f"{number}.{leaf}" for number in numbers for leaf in (gate, down, up) if (number, leaf) not in parts
        ]:
            raise QuantError(f"{layer}.{missing[0]} is missing", _REMEDY)
        name = layer.replace(".block_sparse_moe.", ".mlp.")
        both = [torch.cat((parts[number, gate], parts[number, up])) for number in numbers]
        fused[f"{name}.gate_up_proj"] = torch.stack(both)
        fused[f"{name}.down_proj"] = torch.stack([parts[number, down] for number in numbers])
    return fused
