from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quant.inspect import inspect_model
from quant.verify.experts import Experts, read_experts
from quant.verify.report import verify
from tests.quant.checkpoints import (
    COMPRESSED_TENSORS,
    CONFIG,
    compressed_tensors_linear,
    embeddings,
    layer,
    write_json,
    write_safetensors,
)

HIDDEN, WIDE, COUNT = 64, 48, 4
MOE = {"num_experts": COUNT, "num_experts_per_tok": 2, "moe_intermediate_size": WIDE, "num_hidden_layers": 1}
LEAVES = {"gate_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE), "up_proj": (WIDE, HIDDEN)}
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def experts(names: dict[str, str] | None = None, prefix: str = "model.layers.0.mlp.experts") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for number in range(COUNT):
        for leaf, shape in LEAVES.items():
            tensors |= compressed_tensors_linear(f"{prefix}.{number}.{names[leaf] if names else leaf}", *shape)
    return tensors


def write(directory: Path, tensors: dict[str, Any], **config: Any) -> Path:
    directory.mkdir()
    router = {"model.layers.0.mlp.gate.weight": ("BF16", [COUNT, HIDDEN], b"\x80\x3f" * (COUNT * HIDDEN))}
    dense = {name: tensor for name, tensor in layer(0).items() if ".mlp." not in name}
    write_safetensors(directory / "model.safetensors", embeddings() | dense | router | tensors)
    quantization = COMPRESSED_TENSORS | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
    write_json(directory / "config.json", CONFIG | MOE | {"quantization_config": quantization} | config)
    write_json(directory / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    write_json(directory / "tokenizer_config.json", {})
    return directory


def errors(directory: Path) -> list[str]:
    return [str(finding) for finding in verify(directory).findings if finding.severity == "error"]


@pytest.mark.parametrize("names", [None, MIXTRAL], ids=["Qwen", "Mixtral"])
def test_a_whole_mixture_is_clean_and_its_routers_stay_in_16_bits(tmp_path: Path, names: dict[str, str] | None) -> None:
    assert errors(write(tmp_path / "model", experts(names))) == []


def test_experts_in_16_bits_without_a_gate_are_whole_where_the_config_says_so(tmp_path: Path) -> None:
    plain = {
        f"model.layers.0.mlp.experts.{number}.{leaf}.weight": ("BF16", list(LEAVES[leaf]), b"\x80\x3f" * HIDDEN * WIDE)
        for number in range(COUNT)
        for leaf in ("up_proj", "down_proj")
    }
    ignore = {"ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*experts.*"]}
    config = {"quantization_config": COMPRESSED_TENSORS | ignore}
    assert errors(write(tmp_path / "ungated", plain, mlp_hidden_act="relu2", **config)) == []
    (finding,) = errors(write(tmp_path / "gated", plain, **config))
    assert "none for 0.gate_proj" in finding


def test_inspect_tells_of_the_experts(tmp_path: Path) -> None:
    summary = inspect_model(write(tmp_path / "model", experts()))
    weights = COUNT * 3 * HIDDEN * WIDE
    assert summary.experts == "4 a layer, 2 a token, 48 wide"
    assert summary.bytes_by_kind["NVFP4 experts"] == weights // 2 + weights // 16 + COUNT * 3 * 4
    assert summary.kept_modules == ("embed_tokens", "gate", "lm_head")
    assert summary.tensor_parallel[2].endswith(
        "K=48 does not leave each rank a multiple of the group size 16; sizes that work: 1"
    )


def test_a_missing_projection_is_named_with_its_expert(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in experts().items() if ".2.up_proj." not in name}
    (problem,) = errors(write(tmp_path / "model", tensors))
    assert problem.startswith(
        "model.layers.0.mlp.experts: expected 4 experts, as config.json says, got none for 2.up_proj"
    )


def test_experts_of_another_size_than_declared_are_named(tmp_path: Path) -> None:
    found = errors(write(tmp_path / "model", experts(), moe_intermediate_size=96))
    assert len(found) == COUNT * 3
    assert "experts.0.down_proj: expected experts 96 wide, as config.json says, got [64, 48]" in "\n".join(found)


def test_experts_in_16_bits_beside_quantized_ones_are_refused(tmp_path: Path) -> None:
    tensors = experts()
    for leaf, shape in LEAVES.items():
        name = f"model.layers.0.mlp.experts.1.{leaf}"
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            del tensors[f"{name}.{suffix}"]
        tensors[f"{name}.weight"] = ("BF16", list(shape), b"\x80\x3f" * (shape[0] * shape[1]))
    found = "\n".join(errors(write(tmp_path / "model", tensors)))
    assert (
        "experts: expected a layer's experts to be quantized all or none, got 3 of 12 projections in 16 bits" in found
    )


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, Experts(128, 8, 768)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}, Experts(8, 2, 14336)),
        ({"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}, Experts(64, 6, 1408)),
        ({"num_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 8}, None),
        ({"num_experts": None, "intermediate_size": 8}, None),
        ({"num_experts": "many", "num_experts_per_tok": 2, "intermediate_size": 8}, None),
        (json.loads(json.dumps(CONFIG)), None),
    ],
)
def test_what_a_config_declares(sizes: dict[str, Any], found: Experts | None) -> None:
    assert read_experts(sizes) == found
