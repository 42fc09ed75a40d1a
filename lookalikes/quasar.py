"""Small look-alikes of QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4, a Qwen3_5ForConditionalGeneration.

Tensor names and dtypes are the public checkpoint's (its index), and so is the config (quasar_config.py). Hidden and
head sizes, layers and vocabulary are scaled down. The numbers of heads are true, and so are the widths that fit no
tile. The inputs of a Gated DeltaNet layer are 2144 wide together: 96 beyond a multiple of 128, as the original's 16480.
in_proj_b and in_proj_a have 48 of these each. A rank holds 1072 at TP=2, and 536 at TP=4. Fused members have different
globals. A vision tower is there. An MTP layer is declared, but its tensors are missing, as in the original.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lookalikes.quasar_config import IGNORE, SMALL, Sizes, config
from quant import e4m3
from quant.blockwise import quantize_matrix
from quant.formats.compressed_tensors import FLOAT, LAYOUT, MIXED, PACKING
from quant.formats.linear import read_linear
from quant.selection import matching_pattern


def write(
    directory: Path, sizes: Sizes = SMALL, seed: int = 0, *, mixed: bool = False
) -> Qwen3_5ForConditionalGeneration:
    """Writes the model directory, 5 MB; returns its dequantized twin, transformers' model in float32.

    `mixed`: attention and Gated DeltaNet in FP8, a scale per row, as unsloth's Qwen3.8-27B-NVFP4 has them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = config(sizes)
    if mixed:
        settings["quantization_config"] = _mixed(settings["quantization_config"])
    torch.manual_seed(seed)
    known = {name: value for name, value in settings.items() if name not in ("quantization_config", "architectures")}
    twin = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**json.loads(json.dumps(known)))).float().eval()
    stored: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(twin.named_parameters()):
        parameter.requires_grad_(requires_grad=False)
        _draw(name, parameter, number)
        module = name.removesuffix(".weight")
        linear = name.endswith("_proj.weight") or ".in_proj_" in name
        if linear and mixed and "_attn." in name and not matching_pattern(module, IGNORE):
            tensors = _in_fp8(parameter)
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        elif linear and not matching_pattern(module, IGNORE):
            amax = float(parameter.abs().max()) * (1 + 0.1 * (number % 7))  # fused members' globals differ
            made = quantize_matrix(parameter.data, amax=amax, name=name)
            divisor = 1 / made.row_factor[:1]
            tensors = {LAYOUT.codes: made.codes, LAYOUT.scales: made.block_scales, LAYOUT.global_scale: divisor}
            parameter.data = read_linear(LAYOUT, tensors, module, 16).dequantize(torch.float32)
            tensors[LAYOUT.input_scale] = torch.tensor([200.0 + number])
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        else:
            kept = torch.float32 if name.endswith((".A_log", "linear_attn.norm.weight")) else torch.bfloat16
            parameter.data = parameter.to(kept).float()
            stored[name] = parameter.to(kept)
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    _save(directory, stored)
    _write_tokenizer(directory)
    return twin


def _in_fp8(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """A linear's tensors in FP8 with a scale per row. `parameter` becomes what they stand for."""
    scale = parameter.abs().amax(1, keepdim=True) / e4m3.MAX
    codes = e4m3.encode(parameter / scale)
    parameter.data = codes.float() * scale
    return {"weight": codes, "weight_scale": scale}


def _mixed(quantization: dict[str, Any]) -> dict[str, Any]:
    (fours,) = quantization["config_groups"].values()
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    eights = {"format": FLOAT, "targets": ["re:.*self_attn.*", "re:.*linear_attn.*"], "weights": weights}
    groups = {"group_0": fours | {"format": PACKING, "targets": ["re:.*mlp.*"]}, "group_1": eights}
    return quantization | {"format": MIXED, "config_groups": groups}


def _draw(name: str, parameter: torch.Tensor, number: int) -> None:
    """Weights under which states decay at different rates, and logits lie apart, so that greedy choices are clear."""
    generator = torch.Generator().manual_seed(number)
    if name.endswith("A_log"):
        parameter.data = torch.empty_like(parameter).uniform_(0.5, 8, generator=generator).log()
    elif name.endswith("dt_bias"):
        parameter.data = torch.empty_like(parameter).uniform_(-5, 0, generator=generator)
    elif parameter.dim() == 1:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    elif name.endswith("conv1d.weight"):
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    else:
        spread = 0.3 if "lm_head" in name else 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
        parameter.data = spread * torch.randn(parameter.shape, generator=generator)


def _save(directory: Path, stored: dict[str, torch.Tensor]) -> None:
    names = sorted(stored)
    shards = {
        f"model-{number + 1:05d}-of-00002.safetensors": names[number * len(names) // 2 : (number + 1) * len(names) // 2]
        for number in range(2)
    }
    for shard, members in shards.items():
        save_file({name: stored[name].contiguous() for name in members}, directory / shard, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
        "weight_map": {name: shard for shard, members in shards.items() for name in members},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index for index, letter in enumerate(letters, start=2)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "</s>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(directory)
