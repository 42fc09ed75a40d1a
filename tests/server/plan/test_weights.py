from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookalikes.public_models import dense
from quant.formats.weights import PER_BLOCK, PER_ROW, PER_TENSOR, nvfp4
from quant.safetensors_header import Entry
from server.plan.model import Model, describe
from server.plan.weights import Split, sharded, stage_layers, stage_weights, weights_per_gpu

from .models import model


def test_a_linear_s_bytes_are_codes_scales_and_row_factors() -> None:
    assert nvfp4(16).packed_bytes(64, 32) == 64 * 16 + 64 * 2 + 64 * 4


def eights(*, head: bool = False) -> Model:
    """A layer with FP8 of each kind beside NVFP4, and a head in 16 bits or NVFP4."""
    config, _ = dense("8B")
    entries = {
        "model.layers.0.self_attn.q_proj.weight": Entry("F8_E4M3", (256, 512), 0, 256 * 512),
        "model.layers.0.self_attn.q_proj.weight_scale": Entry("F32", (), 0, 4),
        "model.layers.0.self_attn.q_proj.input_scale": Entry("F32", (), 0, 4),
        "model.layers.0.self_attn.o_proj.weight": Entry("F8_E4M3", (512, 256), 0, 512 * 256),
        "model.layers.0.self_attn.o_proj.weight_scale_inv": Entry("F32", (4, 2), 0, 32),
        "model.layers.0.mlp.up_proj.weight": Entry("F8_E4M3", (128, 512), 0, 128 * 512),
        "model.layers.0.mlp.up_proj.weight_scale": Entry("BF16", (128, 1), 0, 256),
    }
    if head:
        entries |= {
            "lm_head.weight_packed": Entry("U8", (1000, 256), 0, 256_000),
            "lm_head.weight_scale": Entry("F8_E4M3", (1000, 32), 0, 32_000),
            "lm_head.weight_global_scale": Entry("F32", (1,), 0, 4),
        }
    return describe(config, entries, "config.json")


def test_fp8_linears_take_a_byte_per_weight_and_their_scales_spread_over_rows() -> None:
    found = eights()
    assert {linear.name.rpartition(".")[2]: linear.kind for linear in found.linears} == {
        "q_proj": PER_TENSOR,
        "o_proj": PER_BLOCK,
        "up_proj": PER_ROW,
    }
    assert found.plain == ()
    one, two = (weights_per_gpu(found, Split(ranks), "packed", 2, 2).linears for ranks in (1, 2))
    assert one == 256 * 512 + 4 * 256 + 512 * 256 + 4 * 512 * 2 + 128 * 512 + 4 * 128
    assert two == 128 * 512 + 4 * 128 + 512 * 128 + 4 * 512 + 64 * 512 + 4 * 64


def test_a_quantized_head_is_padded_split_over_ranks_and_on_the_last_stage_only() -> None:
    without, found = eights(), eights(head=True)

    def head(split: Split, stage: int) -> int:
        ours, none = (stage_weights(one, split, stage, "packed", 2, 2).linears for one in (found, without))
        return ours - none

    assert head(Split(1), 0) == nvfp4(16).packed_bytes(1024, 512)
    assert head(Split(2), 0) == nvfp4(16).packed_bytes(512, 512)
    assert [head(Split(1, 2), stage) for stage in (0, 1)] == [0, nvfp4(16).packed_bytes(1024, 512)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("o_proj", (5120, 2048)), ("q_proj", (1280, 8192)), ("k_proj", (1280, 8192)), ("odd_proj", (5120, 8192))],
)
def test_four_ranks_cut_a_linear_along_the_side_that_its_kind_says(name: str, shape: tuple[int, int]) -> None:
    assert sharded(f"model.layers.0.self_attn.{name}", 5120, 8192, model("32B"), 4) == shape


def test_key_and_value_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    qwen = model("8B", num_key_value_heads=2)
    assert sharded("a.k_proj", 256, 4096, qwen, 4) == (128, 4096)
    assert sharded("a.q_proj", 4096, 4096, qwen, 4) == (1024, 4096)


@pytest.mark.parametrize("name", ["8B", "32B", "27B"])
@pytest.mark.parametrize("split", [Split(2), Split(4), Split(1, 2), Split(1, 4), Split(2, 2)])
def test_no_split_loses_a_weight(name: str, split: Split) -> None:
    whole = weights_per_gpu(model(name), Split(1), "packed", 2, 2)
    share = weights_per_gpu(model(name), split, "packed", 2, 2)
    assert share.linears * split.gpus >= whole.linears
    assert share.linears * split.gpus == pytest.approx(whole.linears, rel=0.02)
    assert whole.plain / split.gpus <= share.plain < whole.plain


def test_dense_weights_take_the_engine_s_dtype() -> None:
    qwen = model("8B")
    numbers = sum(linear.rows * linear.columns for linear in qwen.linears)
    assert weights_per_gpu(qwen, Split(1), "dense", 4, 4).linears == 4 * numbers


def test_a_tied_head_is_counted_once_and_on_both_ends_of_a_pipeline() -> None:
    embedding = 2 * 151936 * 4096
    tied, untied = model("8B", tie_word_embeddings=True), model("8B")
    assert (
        weights_per_gpu(untied, Split(1), "packed", 2, 2).plain - weights_per_gpu(tied, Split(1), "packed", 2, 2).plain
        == embedding
    )
    for one in (tied, untied):
        first_or_last = weights_per_gpu(one, Split(1, 2), "packed", 2, 2).plain
        assert embedding < first_or_last < 1.1 * embedding


@given(layers=st.integers(1, 100), stages=st.integers(1, 8))
def test_every_layer_is_on_one_stage(layers: int, stages: int) -> None:
    split = Split(1, stages)
    found = [layer for stage in range(stages) for layer in stage_layers(layers, split, stage)]
    assert found == list(range(layers))


def test_what_is_left_over_goes_to_the_stages_before_the_last() -> None:
    assert [len(stage_layers(10, Split(1, 4), stage)) for stage in range(4)] == [2, 3, 3, 2]


def test_embedding_and_head_may_have_a_dtype_of_their_own() -> None:
    qwen = model("8B")
    wide, narrow = (weights_per_gpu(qwen, Split(1), "packed", 4, size).plain for size in (4, 2))
    assert wide - narrow == 2 * 2 * 151936 * 4096


def test_other_formats_parts_are_shared_out_as_their_linears_are() -> None:
    config, entries = dense("8B")
    shapes = {"q_proj": 4096, "k_proj": 1024, "o_proj": 4096}
    for name, rows in shapes.items():
        prefix = f"model.layers.0.self_attn.{name}"
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
            del entries[f"{prefix}.{suffix}"]
        entries.plain(f"{prefix}.qweight", 4096 // 8, rows, dtype="I32", size=4)
        entries.plain(f"{prefix}.scales", 4096 // 128, rows, dtype="F16")
        entries.plain(f"{prefix}.g_idx", 4096, dtype="I32", size=4)
    found = describe(config, entries, "config.json")
    whole, half, many = (weights_per_gpu(found, Split(ranks), "packed", 2, 2).plain for ranks in (1, 2, 16))
    parts = {name: rows * 4096 // 2 + 2 * rows * 32 for name, rows in shapes.items()}
    rest = 2 * 2 * 151936 * 4096  # embedding and head
    assert whole - half == pytest.approx(sum(parts.values()) / 2 + rest / 2, abs=100)
    # Eight key heads are copied to sixteen ranks.
    left = parts["q_proj"] / 16 + parts["k_proj"] / 8 + parts["o_proj"] / 16 + rest / 16
    assert whole - many == pytest.approx(sum(parts.values()) + rest - left, rel=1e-3)


def test_an_embedding_stored_in_32_bits_stays_in_the_engine_s_dtype() -> None:
    qwen = model("8B")
    stored_wide = replace(
        qwen,
        plain=tuple(
            replace(one, nbytes=2 * one.nbytes) if one.name.endswith(("embed_tokens.weight", "lm_head.weight")) else one
            for one in qwen.plain
        ),
    )
    assert weights_per_gpu(stored_wide, Split(1), "packed", 4, 2) == weights_per_gpu(qwen, Split(1), "packed", 4, 4)
