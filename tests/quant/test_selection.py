import pytest
import torch

from quant.errors import QuantError
from quant.safetensors_file import TensorInfo
from quant.selection import DEFAULT_IGNORE, FUSED_LAYERS, matching_pattern, select, siblings


def infos(*names: str, shape: tuple[int, ...] = (8, 64), dtype: torch.dtype = torch.float16) -> dict[str, TensorInfo]:
    return {name: TensorInfo(dtype, shape, "model.safetensors") for name in names}


@pytest.mark.parametrize(
    "module",
    [
        "lm_head",
        "language_model.lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.layers.0.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.router",
        "model.layers.0.mlp.shared_expert_gate",
        "model.visual.blocks.0.attn.qkv",
        "vision_tower.layers.0.q_proj",
        "audio_tower.layers.0.q_proj",
        "multi_modal_projector.linear_1",
        "mtp.layers.0.self_attn.q_proj",
    ],
)
def test_heads_embeddings_routers_towers_and_mtp_stay_in_16_bits_by_default(module):
    selection = select(infos(f"{module}.weight", "model.layers.0.mlp.down_proj.weight"), 16, DEFAULT_IGNORE)

    assert selection.linears == ("model.layers.0.mlp.down_proj",)
    assert selection.kept[f"{module}.weight"].startswith("ignored by 're:")


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
        "model.language_model.layers.3.linear_attn.in_proj_qkv",
        "model.layers.0.mlp.experts.7.down_proj",
        "model.layers.0.block_sparse_moe.experts.0.w2",
    ],
)
def test_layers_and_experts_are_quantized_by_default(module):
    assert select(infos(f"{module}.weight"), 16, DEFAULT_IGNORE).linears == (module,)


@pytest.mark.parametrize(
    ("name", "info", "reason"),
    [
        ("norm.weight", TensorInfo(torch.float16, (64,), "s"), "not a 2-D float weight"),
        ("conv.weight", TensorInfo(torch.float16, (8, 1, 64), "s"), "not a 2-D float weight"),
        ("proj.bias", TensorInfo(torch.float16, (8, 64), "s"), "not a 2-D float weight"),
        ("table.weight", TensorInfo(torch.int32, (8, 64), "s"), "not a 2-D float weight"),
        ("proj.weight", TensorInfo(torch.float16, (8, 40), "s"), "K=40 is not a multiple of 16"),
        ("proj.weight", TensorInfo(torch.float16, (8, 0), "s"), "K=0 is not a multiple of 16"),
    ],
)
def test_what_cannot_be_quantized_is_kept_with_the_reason(name, info, reason):
    assert select({name: info}, 16, ()).kept == {name: reason}


def test_the_group_size_decides_which_k_fits():
    tensors = infos("proj.weight", shape=(8, 48))

    assert select(tensors, 16, ()).linears == ("proj",)
    assert select(tensors, 32, ()).kept == {"proj.weight": "K=48 is not a multiple of 32"}


def test_patterns_match_as_compressed_tensors_does():
    assert matching_pattern("a.b", ("a",)) is None, "a literal is the whole name"
    assert matching_pattern("a.b", ("x", "a.b")) == "a.b"
    assert matching_pattern("a.b", ("re:b",)) is None, "a pattern starts at the name's start"
    assert matching_pattern("a.b", ("re:a",)) == "re:a", "and may end before the name's end"


def test_a_broken_pattern_is_named():
    with pytest.raises(QuantError, match=r"ignore: '\(' is not a pattern"):
        select(infos("proj.weight"), 16, ("re:(",))


@pytest.mark.parametrize("misspelt", ["model.layers.0.mlp.down_prj", "down_proj", "re:down_proj", ""])
def test_a_user_s_name_or_pattern_without_a_match_is_refused_with_the_nearest(misspelt):
    tensors = infos("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(QuantError, match=r"which matches none.*The nearest name is model\.layers\.0\.mlp\.down_proj"):
        select(tensors, 16, (*DEFAULT_IGNORE, misspelt))


@pytest.mark.parametrize("members", FUSED_LAYERS, ids="+".join)
def test_fused_layers_are_each_other_s_siblings_within_their_parent(members):
    expected = tuple(f"model.layers.0.x.{member}" for member in members)

    for member in expected:
        assert siblings(member) == expected


def test_a_layer_that_is_not_fused_is_its_own_sibling():
    assert siblings("model.layers.0.mlp.down_proj") == ("model.layers.0.mlp.down_proj",)
    assert siblings("q_proj") == ("q_proj", "k_proj", "v_proj")


def test_a_fused_layer_quantized_in_part_is_refused():
    tensors = infos("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")

    with pytest.raises(QuantError, match=r"attn\.k_proj\.weight stays in 16 bits .* but attn\.q_proj\.weight does not"):
        select(tensors, 16, ("attn.k_proj",))
    assert select(tensors, 16, ("re:attn",)).linears == ()


def test_a_sibling_that_the_model_does_not_have_is_no_obstacle():
    assert select(infos("attn.q_proj.weight"), 16, ()).linears == ("attn.q_proj",)
