"""The linear method of FP8 layers: each kind of scale, whole and as each rank's part, alone and fused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.models import ModelRegistry

from engine.layers import fp8
from engine.layers.fp8 import Fp8LinearMethod
from engine.layers.quantization import QuasarNvfp4Config
from lookalikes.linears import Member, fp8_member
from quant.errors import QuantError
from quant.formats.compressed_tensors import scheme
from quant.formats.weights import PER_BLOCK, PER_ROW, PER_TENSOR, WeightKind
from quant.verify.unserved import QUANTIZED_HEADS
from tests.engine.conftest import AsRank
from tests.engine.made_layers import finished_weight, load, make
from tests.quant.reference import E4M3_NANS

RANKS = [(rank, size) for size in (1, 2, 4) for rank in range(size)]
KINDS = {"tensor": PER_TENSOR, "channel": PER_ROW, "block": PER_BLOCK}
ALL = pytest.mark.parametrize("kind", KINDS)


def make_fp8(layer_class: str, *sizes: Any, kind: str) -> Any:
    """A layer of vLLM whose weights are FP8 of this kind."""
    config = QuasarNvfp4Config(scheme(16, ()))
    config._fp8 = {"model.layers.0.proj": KINDS[kind]}
    layer = make(layer_class, *sizes, quant=config)
    assert isinstance(layer.quant_method, Fp8LinearMethod)
    return layer


def cut(weight: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return weight.chunk(size, dim)[rank].float()


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """A product with one is exact but for the scale's one rounding in float32."""
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@ALL
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_column_parallel_layer_keeps_its_rows(as_rank: AsRank, rank: int, size: int, kind: str) -> None:
    as_rank(rank, size)
    whole = fp8_member(280, 192, kind)
    layer = make_fp8("ColumnParallelLinear", 192, 280, kind=kind)
    load(layer, whole)
    same(finished_weight(layer), cut(whole.weight, 0, rank, size))


@ALL
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_row_parallel_layer_keeps_its_columns(as_rank: AsRank, rank: int, size: int, kind: str) -> None:
    as_rank(rank, size)
    columns = 1024 if kind == "block" else 192
    whole = fp8_member(24, columns, kind)
    layer = make_fp8("RowParallelLinear", columns, 24, kind=kind)
    load(layer, whole)
    same(finished_weight(layer), cut(whole.weight, 1, rank, size))


@ALL
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_q_k_and_v_with_their_own_scales_stay_exact(as_rank: AsRank, rank: int, size: int, kind: str) -> None:
    as_rank(rank, size)
    # Two key/value heads: at size 4 each is held by several ranks. 160 rows are no whole number of blocks.
    q, k, v = (fp8_member(heads * 80, 256, kind, seed=heads) for heads in (8, 2, 2))
    layer = make_fp8("QKVParallelLinear", 256, 80, 8, 2, kind=kind)
    for part, name in ((v, "v"), (q, "q"), (k, "k")):
        load(layer, part, name)
    kv_size, kv_rank = min(size, 2), rank * min(size, 2) // size
    parts = (cut(q.weight, 0, rank, size), cut(k.weight, 0, kv_rank, kv_size), cut(v.weight, 0, kv_rank, kv_size))
    same(finished_weight(layer), torch.cat(parts))


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_gate_and_up_may_have_scales_of_different_kinds(as_rank: AsRank, rank: int, size: int) -> None:
    as_rank(rank, size)
    gate, up = fp8_member(32, 48, "tensor", seed=1), fp8_member(16, 48, "channel", seed=2)
    layer = make_fp8("MergedColumnParallelLinear", 48, [32, 16], kind="channel")
    load(layer, gate, 0)
    load(layer, up, 1)
    same(finished_weight(layer), torch.cat((cut(gate.weight, 0, rank, size), cut(up.weight, 0, rank, size))))


@ALL
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_members_fused_on_disk_are_cut_like_their_weights(as_rank: AsRank, rank: int, size: int, kind: str) -> None:
    """Gated DeltaNet stores q, k and v as one tensor beside z; vLLM loads it as members (0, 1, 2) of four."""
    as_rank(rank, size)
    qkv, z = fp8_member(128 + 128 + 256, 144, kind, seed=1), fp8_member(256, 144, kind, seed=2)
    layer = make_fp8("MergedColumnParallelLinear", 144, [128, 128, 256, 256], kind=kind)
    load(layer, qkv, (0, 1, 2))
    load(layer, z, 3)
    members = [*qkv.weight.split([128, 128, 256]), z.weight]
    same(finished_weight(layer), torch.cat([cut(part, 0, rank, size) for part in members]))


@ALL
@pytest.mark.parametrize("devices", [["cpu"], []], ids=["kernels", "dense"])
def test_the_output_agrees_with_float64_on_both_routes(
    as_rank: AsRank, monkeypatch: pytest.MonkeyPatch, kind: str, devices: list[str]
) -> None:
    as_rank(0, 1)
    monkeypatch.setattr(fp8, "kernel_devices", lambda: devices)
    whole = fp8_member(40, 272, kind, "weight_scale_inv")
    layer = make_fp8("ColumnParallelLinear", 272, 40, kind=kind)
    load(layer, whole)
    layer.quant_method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters()} == ({"packed", "scales"} if devices else {"weight"})
    x, bias = torch.randn(3, 5, 272), torch.randn(40)
    expected = x.double() @ whole.weight.T + bias.double()
    torch.testing.assert_close(layer.quant_method.apply(layer, x, bias).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("code", E4M3_NANS)
def test_a_nan_weight_is_an_error_naming_the_layer(as_rank: AsRank, code: int) -> None:
    as_rank(0, 1)
    broken = fp8_member(8, 32)
    broken.tensors["weight"].view(torch.uint8)[3, 1] = code
    layer = make_fp8("ColumnParallelLinear", 32, 8, kind="tensor")
    load(layer, broken)
    with pytest.raises(QuantError, match=r"model\.layers\.0\.proj\.weight\[3, 1\]: expected a number, got NaN"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("scale", [-1.0, torch.nan, torch.inf])
def test_a_scale_that_is_no_positive_number_is_an_error(as_rank: AsRank, scale: float) -> None:
    as_rank(0, 1)
    broken = fp8_member(8, 32, "channel")
    broken.tensors["weight_scale"][5, 0] = scale
    layer = make_fp8("ColumnParallelLinear", 32, 8, kind="channel")
    load(layer, broken)
    with pytest.raises(QuantError, match=r"model\.layers\.0\.proj\.weight_scale: expected .* scales.*row 5"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("missing", ["weight", "weight_scale"])
def test_a_tensor_missing_for_one_member_is_an_error_naming_it(as_rank: AsRank, missing: str) -> None:
    as_rank(0, 1)
    layer = make_fp8("QKVParallelLinear", 64, 16, 2, 2, kind="tensor")
    for seed, name in enumerate("qkv"):
        part = fp8_member(32, 64, seed=seed)
        if name == "k":
            del part.tensors[missing]
        load(layer, part, name)
    with pytest.raises(QuantError, match=rf"model\.layers\.0\.proj\.{missing}.*, member 'k': expected a tensor"):
        layer.quant_method.process_weights_after_loading(layer)


WRONG_TENSORS = {
    "16 bits": ("weight", torch.zeros(8, 32, dtype=torch.float16), "torch.float16"),
    "NVFP4's codes": ("weight", torch.zeros(8, 16, dtype=torch.uint8), "torch.uint8"),
    "cut short": ("weight", torch.zeros(8, 31).to(torch.float8_e4m3fn), "[8, 31]"),
    "scales cut short": ("weight_scale", torch.ones(5, 1), "[5, 1]"),
    "scales of no number": ("weight_scale", torch.ones(1, dtype=torch.uint8), "torch.uint8"),
}


@pytest.mark.parametrize(("name", "tensor", "got"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_a_tensor_that_does_not_fit_is_an_error_naming_it(
    as_rank: AsRank, name: str, tensor: torch.Tensor, got: str
) -> None:
    as_rank(0, 1)
    layer = make_fp8("ColumnParallelLinear", 32, 8, kind="channel")
    parameter = getattr(layer, name)
    with pytest.raises(QuantError, match=rf"model\.layers\.0\.proj\.{name}: expected .*got .*{re.escape(got)}"):
        parameter.weight_loader(parameter, tensor)


def test_a_rank_that_would_cut_a_block_is_refused_with_the_sizes_that_work(as_rank: AsRank) -> None:
    as_rank(0, 4)
    with pytest.raises(QuantError, match=r"multiple of 128 \(FP8 per 128x128 block\), got 96 of 384.*layer: 1, 3"):
        make_fp8("RowParallelLinear", 384, 24, kind="block")


def fused(kinds: dict[str, WeightKind]) -> QuasarNvfp4Config:
    config = QuasarNvfp4Config(scheme(16, ()))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config._fp8 = {f"attn.{name}": kind for name, kind in kinds.items()}
    return config


def test_a_fused_layer_is_fp8_if_all_its_members_are() -> None:
    assert fused({"q_proj": PER_ROW, "k_proj": PER_ROW, "v_proj": PER_TENSOR})._fp8_kind("attn.qkv_proj") == PER_ROW
    assert fused({})._fp8_kind("attn.qkv_proj") is None
    for others in ({}, {"k_proj": PER_BLOCK, "v_proj": PER_ROW}):
        with pytest.raises(ValueError, match=r"attn\.qkv_proj: expected one kind of weights"):
            fused({"q_proj": PER_ROW, **others})._fp8_kind("attn.qkv_proj")


def test_members_keep_what_they_loaded_apart(as_rank: AsRank) -> None:
    """One member's scale under the one name and another's under the other are both found."""
    as_rank(0, 1)
    gate, up = fp8_member(16, 32, "channel", seed=1), fp8_member(16, 32, "channel", "weight_scale_inv", seed=2)
    layer = make_fp8("MergedColumnParallelLinear", 32, [16, 16], kind="channel")
    load(layer, gate, 0)
    load(layer, Member(up.tensors, up.weight), 1)
    same(finished_weight(layer), torch.cat((gate.weight, up.weight)).float())


@pytest.mark.parametrize("architecture", QUANTIZED_HEADS)
def test_models_whose_head_may_be_quantized_hand_it_their_quantization(architecture: str) -> None:
    """What verify lets pass: vLLM's own source of each architecture, or of the class that it wraps."""
    module = ModelRegistry.models[architecture].module_name
    source = Path(importlib.util.find_spec(module).origin).read_text()  # type: ignore[union-attr, arg-type]
    head = source.partition("ParallelLMHead(")[2][:300]
    assert re.search(r"quant_config=(self\.)?quant_config,\s+prefix=maybe_prefix\(prefix, \"lm_head\"\)", head), module


@ALL
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_head_pads_its_vocabulary_with_rows_of_zeros(
    as_rank: AsRank, monkeypatch: pytest.MonkeyPatch, rank: int, size: int, kind: str
) -> None:
    as_rank(rank, size)
    for name, value in (("rank", rank), ("world_size", size)):
        monkeypatch.setattr(vocab_parallel_embedding, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    config = QuasarNvfp4Config(scheme(16, ()))
    config._fp8 = {"lm_head": KINDS[kind]}
    head = vocab_parallel_embedding.ParallelLMHead(260, 144, quant_config=config, prefix="lm_head")
    assert isinstance(head.quant_method, Fp8LinearMethod)
    whole = fp8_member(260, 144, kind)
    load(head, whole)
    head.quant_method.process_weights_after_loading(head)
    got = head.quant_method.apply(head, torch.eye(144)).T
    same(got, cut(torch.cat((whole.weight, torch.zeros(60, 144))), 0, rank, size))
