from __future__ import annotations

import re

import pytest
import torch

from engine.layers import linear
from engine.layers.linear import choose_route
from lookalikes.linears import Member, member
from quant.errors import QuantError
from quant.formats.compressed_tensors import GLOBAL, PACKED, SCALE
from tests.engine.conftest import AsRank
from tests.engine.made_layers import config, finished_weight, load, make
from tests.quant.reference import E4M3_NANS

RANKS = [(rank, size) for size in (1, 2, 4, 8) for rank in range(size)]


def cut(weight: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return weight.chunk(size, dim)[rank].float()


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_column_parallel_layer_keeps_its_rows(as_rank: AsRank, rank: int, size: int, group_size: int) -> None:
    as_rank(rank, size)
    whole = member(24, 64, 700.0, group_size)
    layer = make("ColumnParallelLinear", 64, 24, quant=config(group_size))
    load(layer, whole)
    assert torch.equal(finished_weight(layer), cut(whole.weight, 0, rank, size))


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_row_parallel_layer_keeps_its_columns(as_rank: AsRank, rank: int, size: int, group_size: int) -> None:
    as_rank(rank, size)
    whole = member(24, 256, 0.37, group_size)
    layer = make("RowParallelLinear", 256, 24, quant=config(group_size))
    load(layer, whole)
    assert torch.equal(finished_weight(layer), cut(whole.weight, 1, rank, size))


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_q_k_and_v_with_their_own_globals_stay_exact(as_rank: AsRank, rank: int, size: int) -> None:
    as_rank(rank, size)
    # Two key/value heads: from size 4 on each is held by several ranks.
    q, k, v = member(8 * 16, 64, 1344.0, seed=1), member(2 * 16, 64, 448.25, seed=2), member(2 * 16, 64, 3.0, seed=3)
    layer = make("QKVParallelLinear", 64, 16, 8, 2)
    for part, name in ((v, "v"), (q, "q"), (k, "k")):
        load(layer, part, name)
    kv_size, kv_rank = min(size, 2), rank * min(size, 2) // size
    parts = (cut(q.weight, 0, rank, size), cut(k.weight, 0, kv_rank, kv_size), cut(v.weight, 0, kv_rank, kv_size))
    assert torch.equal(finished_weight(layer), torch.cat(parts))


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_gate_and_up_with_their_own_globals_stay_exact(as_rank: AsRank, rank: int, size: int) -> None:
    as_rank(rank, size)
    gate, up = member(32, 48, 2688.0, seed=1), member(16, 48, 0.001, seed=2)
    layer = make("MergedColumnParallelLinear", 48, [32, 16])
    load(layer, gate, 0)
    load(layer, up, 1)
    assert torch.equal(
        finished_weight(layer), torch.cat((cut(gate.weight, 0, rank, size), cut(up.weight, 0, rank, size)))
    )


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_members_fused_on_disk_share_one_global(as_rank: AsRank, rank: int, size: int) -> None:
    """Gated DeltaNet stores q, k and v as one tensor beside z; vLLM loads it as members (0, 1, 2) of four."""
    as_rank(rank, size)
    qkv, z = member(16 + 16 + 32, 48, 90.0, seed=1), member(32, 48, 7.0, seed=2)
    layer = make("MergedColumnParallelLinear", 48, [16, 16, 32, 32])
    load(layer, qkv, (0, 1, 2))
    load(layer, z, 3)
    members = [*qkv.weight.split([16, 16, 32]), z.weight]
    assert torch.equal(finished_weight(layer), torch.cat([cut(part, 0, rank, size) for part in members]))


@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_whole_qkv_fused_on_disk_is_cut_by_heads(as_rank: AsRank, rank: int, size: int) -> None:
    as_rank(rank, size)
    whole = member(3 * 128, 64, 31.0)
    layer = make("QKVParallelLinear", 64, 16, 8, 8)
    load(layer, whole)
    expected = torch.cat([cut(part, 0, rank, size) for part in whole.weight.split(128)])
    assert torch.equal(finished_weight(layer), expected)


def test_a_replicated_layer_is_whole_on_every_rank(as_rank: AsRank) -> None:
    as_rank(1, 2)
    whole = member(10, 32, 5.0)
    layer = make("ReplicatedLinear", 32, 10)
    load(layer, whole)
    assert torch.equal(finished_weight(layer), whole.weight.float())


def test_the_output_agrees_with_float64(as_rank: AsRank) -> None:
    as_rank(0, 1)
    whole = member(40, 128, 2688.0)
    layer = make("ColumnParallelLinear", 128, 40)
    load(layer, whole)
    layer.quant_method.process_weights_after_loading(layer)
    x, bias = torch.randn(3, 5, 128), torch.randn(40)
    expected = x.double() @ whole.weight.T + bias.double()
    torch.testing.assert_close(layer.quant_method.apply(layer, x, bias).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel_devices", "left"), [(["cpu"], {"packed", "scales", "row_factor"}), ([], {"weight"})])
def test_only_what_the_route_computes_with_stays_after_loading(
    as_rank: AsRank, monkeypatch: pytest.MonkeyPatch, kernel_devices: list[str], left: set[str]
) -> None:
    as_rank(0, 1)
    monkeypatch.setattr(linear, "kernel_devices", lambda: kernel_devices)
    layer = make("ColumnParallelLinear", 32, 8)
    load(layer, member(8, 32, 5.0))
    layer.quant_method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters()} == left


def test_activation_scales_of_w4a4_checkpoints_are_accepted_and_dropped(as_rank: AsRank) -> None:
    as_rank(0, 1)
    gate, up = member(16, 32, 8.0, seed=1), member(16, 32, 9.0, seed=2)
    layer = make("MergedColumnParallelLinear", 32, [16, 16])
    for index, part in enumerate((gate, up)):
        load(layer, Member(part.tensors | {"input_global_scale": torch.tensor([123.0])}, part.weight), index)
    assert torch.equal(finished_weight(layer), torch.cat((gate.weight, up.weight)).float())


@pytest.mark.parametrize("divisor", [torch.nan, torch.inf, 0.0, 1.0])
def test_an_all_zero_member_may_carry_any_global(as_rank: AsRank, divisor: float) -> None:
    as_rank(0, 1)
    zeros, up = member(16, 32, divisor, seed=1), member(16, 32, 9.0, seed=2)
    zeros.tensors[PACKED] = torch.full_like(zeros.tensors[PACKED], 0x80)
    layer = make("MergedColumnParallelLinear", 32, [16, 16])
    load(layer, zeros, 0)
    load(layer, up, 1)
    assert torch.equal(finished_weight(layer), torch.cat((torch.zeros(16, 32), up.weight.float())))


@pytest.mark.parametrize("code", E4M3_NANS)
def test_a_nan_scale_is_an_error_naming_the_layer(as_rank: AsRank, code: int) -> None:
    as_rank(0, 1)
    broken = member(8, 32, 5.0)
    broken.tensors[SCALE].view(torch.uint8)[3, 1] = code
    layer = make("ColumnParallelLinear", 32, 8)
    load(layer, broken)
    with pytest.raises(QuantError, match=r"model\.layers\.0\.proj\.weight_scale: expected numbers, got NaN"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("divisor", [0.0, -5.0, torch.nan, torch.inf])
def test_a_global_that_is_no_positive_number_is_an_error_naming_the_layer(as_rank: AsRank, divisor: float) -> None:
    as_rank(0, 1)
    layer = make("ColumnParallelLinear", 32, 8)
    load(layer, member(8, 32, divisor))
    with pytest.raises(QuantError, match=r"model\.layers\.0\.proj\.weight_global_scale: expected a positive divisor"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("missing", [PACKED, SCALE, GLOBAL])
def test_a_tensor_missing_for_one_member_is_an_error_naming_it(as_rank: AsRank, missing: str) -> None:
    as_rank(0, 1)
    layer = make("QKVParallelLinear", 64, 16, 2, 2)
    parts = {name: member(32, 64, 5.0, seed=seed) for seed, name in enumerate("qkv")}
    del parts["k"].tensors[missing]
    for name, part in parts.items():
        load(layer, part, name)
    with pytest.raises(QuantError, match=rf"model\.layers\.0\.proj\.{missing}, member 'k': expected a tensor"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_member_missing_altogether_is_an_error(as_rank: AsRank) -> None:
    as_rank(0, 1)
    layer = make("QKVParallelLinear", 64, 16, 2, 2)
    load(layer, member(32, 64, 5.0), "q")
    with pytest.raises(QuantError, match=r"model\.layers\.0\.proj.*nothing was loaded"):
        layer.quant_method.process_weights_after_loading(layer)


WRONG_TENSORS = {
    "shape": (PACKED, torch.zeros(8, 15, dtype=torch.uint8), "[8, 15]"),
    "cut short": (SCALE, torch.zeros(4, 2).to(torch.float8_e4m3fn), "[4, 2]"),
    "MXFP4's scales": (SCALE, torch.zeros(8, 2, dtype=torch.uint8), "torch.uint8"),
    "unpacked": (PACKED, torch.zeros(8, 32, dtype=torch.float16), "torch.float16"),
    "global per channel": (GLOBAL, torch.ones(8), "[8]"),
}


@pytest.mark.parametrize(("name", "tensor", "got"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_a_tensor_that_does_not_fit_is_an_error_naming_it(
    as_rank: AsRank, name: str, tensor: torch.Tensor, got: str
) -> None:
    as_rank(0, 1)
    layer = make("ColumnParallelLinear", 32, 8)
    parameter = getattr(layer, name)
    with pytest.raises(QuantError, match=rf"model\.layers\.0\.proj\.{name}: expected .*got .*{re.escape(got)}"):
        parameter.weight_loader(parameter, tensor)


@pytest.mark.parametrize(("size", "works"), [(2, "1, 3"), (4, "1, 3")])
def test_a_tp_size_that_splits_a_group_names_the_sizes_that_work(as_rank: AsRank, size: int, works: str) -> None:
    as_rank(0, size)
    with pytest.raises(QuantError, match=rf"proj: .* group size 16, got {48 // size} of 48; .* this layer: {works}\."):
        make("RowParallelLinear", 48, 8)


@pytest.mark.parametrize(
    ("kernel_devices", "name", "reason"),
    [
        (
            ["cpu"],
            "dense",
            "voltserve_kernels was built without code for cuda: weights are dequantized once, to float16",
        ),
        ([], "dense", "voltserve_kernels is not installed: weights are dequantized once, to float16, at load"),
        (["cpu", "cuda"], "kernels", "voltserve_kernels has code for cuda: weights stay in 4 bits"),
    ],
)
def test_the_route_is_a_function_of_what_is_installed(kernel_devices: list[str], name: str, reason: str) -> None:
    route = choose_route(kernel_devices, "cuda", torch.float16)
    assert route.name == name
    assert route.reason.startswith(reason)


@pytest.mark.parametrize("group_size", [16, 32])
def test_without_kernels_the_layer_is_as_exact(
    as_rank: AsRank, monkeypatch: pytest.MonkeyPatch, group_size: int
) -> None:
    as_rank(0, 1)
    monkeypatch.setattr(linear, "kernel_devices", list)
    whole = member(24, 64, 700.0, group_size)
    layer = make("ColumnParallelLinear", 64, 24, quant=config(group_size))
    load(layer, whole)
    assert torch.equal(finished_weight(layer), whole.weight.float())
