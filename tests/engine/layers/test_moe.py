"""NVFP4 experts in vLLM's RoutedExperts: loaded by its expert mapping, sharded for real, computed by our ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from engine.layers import moe
from engine.layers.experts import routed
from engine.layers.moe import QuasarNvfp4MoEMethod
from engine.layers.quantization import QuasarNvfp4Config, ignores_experts
from lookalikes.linears import Member, in_modelopt, member
from quant.errors import QuantError
from quant.formats import compressed_tensors, modelopt
from quant.formats.scheme import Scheme
from tests.engine.conftest import AsRank
from tests.quant.reference import E4M3_NANS

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 128, 4, 2
LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
RANKS = [(rank, size) for size in (1, 2, 4, 8) for rank in range(size)]
SCHEMES = {
    "compressed-tensors": compressed_tensors.scheme(16, ()),
    "compressed-tensors, 32": compressed_tensors.scheme(32, ()),
    "modelopt": Scheme("modelopt", "", modelopt.LAYOUT, 16, ()),
    "modelopt AWQ": Scheme("modelopt", "", modelopt.LAYOUT, 16, (), pre_quant_scale=True),
}
Experts = list[dict[str, Member]]


@pytest.fixture
def as_expert_rank(as_rank: AsRank, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def fake(rank: int, size: int) -> None:
        as_rank(rank, size)
        monkeypatch.setattr(config, "get_tensor_model_parallel_rank", lambda: rank)

    return fake


def make(size: int = 1, scheme: Scheme = SCHEMES["compressed-tensors"], **options: Any) -> RoutedExperts:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE} | options
    parallel = {"tp_size": size, "dp_size": 1, "pcp_size": 1}
    quantization = QuasarNvfp4Config(scheme)
    return FusedMoEFactory(**sizes, **parallel, quant_config=quantization, prefix=PREFIX).routed_experts


def experts(scheme: Scheme, intermediate: int = INTERMEDIATE) -> Experts:
    """Every projection of every expert has a global of its own. The lists are the caller's, the tensors are shared."""
    return [
        {name: Member(dict(part.tensors), part.weight) for name, part in projections.items()}
        for projections in _made_experts(scheme, intermediate)
    ]


@cache
def _made_experts(scheme: Scheme, intermediate: int) -> Experts:
    shapes = {"w1": (intermediate, HIDDEN), "w2": (HIDDEN, intermediate), "w3": (intermediate, HIDDEN)}
    made: Experts = []
    for expert in range(EXPERTS):
        projections = {}
        for number, (name, shape) in enumerate(shapes.items()):
            seed = 10 * expert + number
            divisor = 2000.0 + 333 * seed if scheme.layout.divides else 1.0
            part = member(*shape, divisor, scheme.group_size, seed)
            projections[name] = part if scheme.layout.divides else in_modelopt(part, 1e-3 + 1e-4 * seed)
        made.append(projections)
    return made


def load(layer: RoutedExperts, parts: Experts, leaves: dict[str, str] = LEAVES) -> None:
    """As vLLM's models do it: by the names in the checkpoint."""
    tensors = {
        f"{expert}.{leaves[projection]}.{suffix}": tensor
        for expert, projections in enumerate(parts)
        for projection, part in projections.items()
        for suffix, tensor in part.tensors.items()
    }
    assert len(list(layer.load_weights(tensors.items()))) == len(tensors)


def weights_of(layer: RoutedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2 I, H] and w2 [E, H, I], as the op multiplies with them: what it makes of the identity."""
    matrices = []
    for name in ("w13", "w2"):
        packed, scales, factors = (getattr(layer, f"{name}_{part}") for part in ("packed", "scales", "row_factor"))
        width = scales.shape[2] * layer.quant_method.group_size
        operands = ((packed[e], scales[e], factors[e]) for e in range(EXPERTS))
        matrices.append(
            torch.stack(
                [
                    torch.ops.voltserve.nvfp4_linear(torch.eye(width), *one, layer.quant_method.group_size).T
                    for one in operands
                ]
            )
        )
    return matrices[0], matrices[1]


def reference(parts: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The experts' sum in float64, from the checkpoint's values."""
    y = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, value in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, down, up = (parts[expert][name].weight for name in ("w1", "w2", "w3"))
            y[token] += weight * (down @ (silu(gate @ value) * (up @ value)))
    return y


@pytest.mark.parametrize("scheme", list(SCHEMES.values())[:3], ids=list(SCHEMES)[:3])
@pytest.mark.parametrize(("rank", "size"), RANKS)
def test_a_rank_keeps_its_rows_of_gate_and_up_and_its_columns_of_down(
    as_expert_rank: AsRank, rank: int, size: int, scheme: Scheme
) -> None:
    intermediate = 32 * 8 if scheme.group_size == 32 else INTERMEDIATE
    as_expert_rank(rank, size)
    layer, parts = make(size, scheme, intermediate_size=intermediate), experts(scheme, intermediate)
    load(layer, parts)
    layer.quant_method.process_weights_after_loading(layer)
    w13, w2 = weights_of(layer)
    for expert, projections in enumerate(parts):
        own = {name: part.weight.chunk(size, 1 if name == "w2" else 0)[rank] for name, part in projections.items()}
        expected = {"w13": torch.cat((own["w1"], own["w3"])), "w2": own["w2"]}
        torch.testing.assert_close(w13[expert].double(), expected["w13"], rtol=1e-6, atol=0)
        torch.testing.assert_close(w2[expert].double(), expected["w2"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("leaves", [LEAVES, {"w1": "w1", "w2": "w2", "w3": "w3"}], ids=["qwen", "mixtral"])
@pytest.mark.parametrize("kernel_devices", [["cpu"], []], ids=["kernels", "dense"])
def test_a_token_s_experts_are_summed_by_their_router_weights(
    as_expert_rank: AsRank, monkeypatch: pytest.MonkeyPatch, leaves: dict[str, str], kernel_devices: list[str]
) -> None:
    as_expert_rank(0, 1)
    monkeypatch.setattr(moe, "kernel_devices", lambda: kernel_devices)
    scheme = SCHEMES["compressed-tensors"]
    layer, parts = make(scheme=scheme, ckpt_names=(leaves["w1"], leaves["w2"], leaves["w3"])), experts(scheme)
    load(layer, parts, leaves)
    layer.quant_method.process_weights_after_loading(layer)
    random = torch.Generator().manual_seed(0)
    x, logits = torch.randn(19, HIDDEN, generator=random), 3 * torch.randn(19, EXPERTS, generator=random)
    y = layer.quant_method.apply_monolithic(layer, x.clone(), logits)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    expected = reference(parts, x, weights / weights.sum(-1, keepdim=True), ids)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_the_ranks_add_up_to_the_whole(as_expert_rank: AsRank) -> None:
    scheme = SCHEMES["compressed-tensors"]
    parts = experts(scheme)
    random = torch.Generator().manual_seed(0)
    x, logits = torch.randn(5, HIDDEN, generator=random), torch.randn(5, EXPERTS, generator=random)
    sums = {}
    for size in (1, 4):
        outputs = []
        for rank in range(size):
            as_expert_rank(rank, size)
            layer = make(size, scheme)
            get_current_vllm_config().compilation_config.static_forward_context.clear()
            load(layer, parts)
            layer.quant_method.process_weights_after_loading(layer)
            outputs.append(layer.quant_method.apply_monolithic(layer, x, logits))
        sums[size] = torch.stack(outputs).sum(0)
    torch.testing.assert_close(sums[4], sums[1], rtol=1e-4, atol=1e-5 * sums[1].abs().max().item())


def test_no_tokens_give_no_results(as_expert_rank: AsRank) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["compressed-tensors"]
    layer = make(scheme=scheme)
    load(layer, experts(scheme))
    layer.quant_method.process_weights_after_loading(layer)
    y = layer.quant_method.apply_monolithic(layer, torch.empty(0, HIDDEN), torch.empty(0, EXPERTS))
    assert y.shape == (0, HIDDEN)


def test_only_what_is_computed_with_stays_after_loading(as_expert_rank: AsRank) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["modelopt"]
    layer = make(scheme=scheme)
    load(layer, experts(scheme))
    layer.quant_method.process_weights_after_loading(layer)
    parts = {f"{name}_{part}" for name in ("w13", "w2") for part in ("packed", "scales", "row_factor")}
    assert {name for name, _ in layer.named_parameters()} == parts


@pytest.mark.parametrize("suffix", [compressed_tensors.PACKED, compressed_tensors.SCALE, compressed_tensors.GLOBAL])
def test_a_missing_tensor_is_an_error_naming_expert_and_projection(as_expert_rank: AsRank, suffix: str) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["compressed-tensors"]
    layer, parts = make(scheme=scheme), experts(scheme)
    del parts[2]["w3"].tensors[suffix]
    load(layer, parts)
    with pytest.raises(QuantError, match=rf"mlp\.experts\.2\.w3\.{suffix}: expected a tensor, got none"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        (compressed_tensors.PACKED, torch.zeros(127, 32, dtype=torch.uint8), r"uint8 \[128, 32\], got .*\[127, 32\]"),
        (compressed_tensors.SCALE, torch.zeros(128, 4, dtype=torch.uint8), r"e4m3fn \[128, 4\], got torch\.uint8"),
        (compressed_tensors.GLOBAL, torch.ones(2), r"float32 \[1\], got torch\.float32 \[2\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_where_vllm_would_take_a_corner_of_it(
    as_expert_rank: AsRank, suffix: str, tensor: torch.Tensor, message: str
) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["compressed-tensors"]
    layer, parts = make(scheme=scheme), experts(scheme)
    parts[1]["w1"].tensors[suffix] = tensor
    with pytest.raises(QuantError, match=rf"experts\.1\.w1\.{suffix}: expected .*{message}"):
        load(layer, parts)


@pytest.mark.parametrize("code", E4M3_NANS)
def test_a_nan_scale_is_an_error_naming_expert_and_projection(as_expert_rank: AsRank, code: int) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["compressed-tensors"]
    layer, parts = make(scheme=scheme), experts(scheme)
    broken = parts[3]["w2"].tensors[compressed_tensors.SCALE].view(torch.uint8).clone()
    broken[5, 1] = code
    parts[3]["w2"].tensors[compressed_tensors.SCALE] = broken.view(torch.float8_e4m3fn)
    load(layer, parts)
    with pytest.raises(QuantError, match=r"experts\.3\.w2\.weight_scale\[5, 1\]: .*got NaN"):
        layer.quant_method.process_weights_after_loading(layer)


def test_awq_s_input_scales_are_refused_by_name(as_expert_rank: AsRank) -> None:
    as_expert_rank(0, 1)
    scheme = SCHEMES["modelopt AWQ"]
    layer, parts = make(scheme=scheme), experts(scheme)
    parts[0]["w1"].tensors["pre_quant_scale"] = torch.ones(HIDDEN)
    with pytest.raises(QuantError, match=r"mlp\.experts\.\*\.pre_quant_scale: expected experts without one"):
        load(layer, parts)


@pytest.mark.parametrize(("size", "works"), [(4, "1, 2, 3, 6"), (8, "1, 2, 3, 6")])
def test_a_tp_size_that_splits_a_group_names_the_sizes_that_work(as_expert_rank: AsRank, size: int, works: str) -> None:
    as_expert_rank(0, size)
    with pytest.raises(QuantError, match=rf"got {96 // size} of 96; tensor-parallel sizes .*: {works}\."):
        make(size, intermediate_size=96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu"}, "got activation gelu"),
        ({"has_bias": True}, "got biases"),
        ({"apply_router_weight_on_input": True}, "got router weights on the input"),
    ],
)
def test_other_kinds_of_experts_are_refused_by_name(
    as_expert_rank: AsRank, options: dict[str, Any], message: str
) -> None:
    as_expert_rank(0, 1)
    with pytest.raises(NotImplementedError, match=rf"model\.layers\.0\.mlp\.experts: .*{message}"):
        make(**options)


def test_expert_parallelism_is_refused_by_its_flag(
    as_expert_rank: AsRank, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_expert_rank(0, 2)
    monkeypatch.setattr(vllm_config.parallel_config, "enable_expert_parallel", True)
    with pytest.raises(NotImplementedError, match="Leave --enable-expert-parallel out"):
        make(2)


# Which experts are quantized.

PREFIX = "model.layers.0.mlp.experts"
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")


def names(leaves: tuple[str, ...], *numbers: int) -> tuple[str, ...]:
    return tuple(f"{PREFIX}.{number}.{leaf}" for number in numbers for leaf in leaves)


@pytest.mark.parametrize(
    "ignore",
    [(PREFIX,), names(QWEN, 0, 1, 2, 3), names(MIXTRAL, 0, 1, 2, 3), (r"re:.*mlp\.experts.*",), ("re:.*",)],
    ids=["layer", "each, Qwen", "each, Mixtral", "pattern", "everything"],
)
def test_experts_ignored_altogether_stay_in_16_bits(as_expert_rank: AsRank, ignore: tuple[str, ...]) -> None:
    as_expert_rank(0, 1)
    assert isinstance(make(scheme=compressed_tensors.scheme(16, ignore)).quant_method, UnquantizedFusedMoEMethod)


@pytest.mark.parametrize(
    "ignore", [(), ("lm_head",), (r"re:.*mlp\.gate$",), (f"{PREFIX}0.w1",), ("model.layers.1.mlp.experts",)]
)
def test_experts_that_no_entry_names_are_quantized(as_expert_rank: AsRank, ignore: tuple[str, ...]) -> None:
    as_expert_rank(0, 1)
    assert isinstance(make(scheme=compressed_tensors.scheme(16, ignore)).quant_method, QuasarNvfp4MoEMethod)


@pytest.mark.parametrize("ignore", [names(QWEN, 0, 1, 2), names(("w2",), 0, 1, 2, 3), (r"re:.*\.3\.down_proj",)])
def test_experts_ignored_in_part_are_refused(ignore: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{PREFIX}: expected all experts in NVFP4 or all in 16 bits, got \d+ of 12"):
        ignores_experts(ignore, PREFIX, 4)


def test_experts_keep_all_that_the_layout_holds_beside_the_columns_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs scales are stored tile by tile, so that any row's bytes may hold the scales of a view's columns."""
    rows, groups, padded = 32, 5, 8
    scales = torch.arange(2 * rows * groups, dtype=torch.uint8).reshape(2, rows, groups)

    def pack(codes: torch.Tensor, own: torch.Tensor, _group: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.zeros(rows, padded, dtype=torch.uint8)
        held.flatten()[-rows * groups :] = own.flatten()
        return codes.clone(), held.narrow(1, 0, groups)

    monkeypatch.setattr(torch.ops.voltserve, "nvfp4_pack", pack)
    codes = torch.zeros(2, rows, 40, dtype=torch.uint8)
    _, packed = moe.pack_experts(codes, scales, 16)
    assert packed.shape == scales.shape
    whole = packed.as_strided((2, rows * padded), (packed.stride(0), 1))
    assert torch.equal(whole[:, -rows * groups :], scales.flatten(1))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
def test_routing_on_a_cpu_takes_the_scores_and_the_bias_that_the_model_declares(
    scoring: str, biased: bool, renormalize: bool
) -> None:
    """A bias only chooses. vLLM's own function for CPUs knows neither it nor sigmoid."""
    random = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(9, EXPERTS, generator=random), torch.randn(EXPERTS, generator=random)
    layer = SimpleNamespace(
        use_grouped_topk=False,
        custom_routing_function=None,
        scoring_func=scoring,
        top_k=TOP_K,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias if biased else None,
    )
    weights, ids = routed(layer, torch.zeros(9, HIDDEN), logits)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    chosen = (scores + bias if biased else scores).topk(TOP_K).indices
    expected = scores.gather(1, chosen)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    order, by_number = ids.argsort(-1), chosen.argsort(-1)
    assert torch.equal(ids.long().gather(1, order), chosen.gather(1, by_number))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, by_number) * (2.5 if biased else 1))
