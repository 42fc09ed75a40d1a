from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import volta
from engine.volta import Attention, Gpu

V100 = Gpu(0, "Tesla V100-SXM2-16GB", (7, 0))
A100 = Gpu(1, "NVIDIA A100", (8, 0))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("gpus", "forced", "expected"),
    [
        ([V100], False, "Volta"),
        ([V100, Gpu(1, "Tesla V100-PCIE-32GB", (7, 0))], False, "Volta"),
        ([], False, "CPU"),
        ([A100], True, "Volta"),
        ([V100, A100], True, "Volta"),
        ([], True, "CPU"),
    ],
)
def test_the_platform_follows_from_every_visible_gpu(gpus: list[Gpu], forced: bool, expected: str) -> None:
    chosen = volta.choose_platform(gpus, forced=forced)
    assert (chosen.choice, chosen.problem) == (expected, None)
    assert all(gpu.name in chosen.reason for gpu in gpus)


@pytest.mark.parametrize("gpus", [[V100, A100], [A100, V100], [A100]])
def test_other_gpus_are_refused_by_name(gpus: list[Gpu]) -> None:
    problem = volta.choose_platform(gpus, forced=False).problem
    assert problem is not None
    assert all(str(gpu) in problem for gpu in gpus)
    assert ("CUDA_VISIBLE_DEVICES" in problem) == (V100 in gpus)
    assert "--volta force" in problem


def test_a_forced_platform_says_so() -> None:
    assert "forced" in volta.choose_platform([A100], forced=True).reason


def test_another_dtype_is_refused_with_the_one_to_take() -> None:
    assert volta.choose_dtype("float16", "qwen3").problem is None
    problem = volta.choose_dtype("float32", "qwen3").problem
    assert problem is not None
    assert "got float32 for model type 'qwen3'. Pass --dtype float16" in problem


def test_the_models_that_refuse_float16_are_vllms() -> None:
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS

    assert set(volta.NO_FLOAT16) == set(_FLOAT16_NOT_SUPPORTED_MODELS)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_model_that_refuses_float16_is_named(dtype: str) -> None:
    problem = volta.choose_dtype(dtype, "gemma3").problem
    assert problem is not None
    assert "'gemma3'" in problem


@pytest.mark.parametrize(
    ("asked", "directive", "refused"),
    [
        ("auto", "auto", False),
        ("float16", "auto", False),
        ("fp8", "fp8", False),  # the checkpoint's wish
        ("fp8_e4m3", "auto", True),  # the user's
        ("bfloat16", "auto", True),
    ],
)
def test_keys_and_values_are_float16(asked: str, directive: str, refused: bool) -> None:
    chosen = volta.choose_cache_dtype(asked, directive)
    assert (chosen.problem is not None) == refused
    if refused:
        assert asked in str(chosen.problem)
    else:
        assert chosen.choice == "float16"
        assert (directive in chosen.reason) == (directive != "auto")


ROWS = (Attention("OURS", "fast", head_sizes=(64, 128)), Attention("TRITON_ATTN", "slower"))


@pytest.mark.parametrize(("head_size", "expected"), [(64, "OURS"), (128, "OURS"), (80, "TRITON_ATTN")])
def test_the_first_attention_that_takes_the_heads_is_chosen(head_size: int, expected: str) -> None:
    chosen = volta.choose_attention(None, head_size, ROWS)
    assert chosen.choice == expected
    assert ("OURS takes heads of 64, 128, not 80" in chosen.reason) == (head_size == 80)


def test_an_attention_that_does_not_take_the_layer_is_passed_over_with_its_reason() -> None:
    chosen = volta.choose_attention(None, 64, ROWS, refused={"OURS": "attention sinks not supported"})
    assert chosen.choice == "TRITON_ATTN"
    assert "OURS does not take the layer: attention sinks not supported" in chosen.reason


def test_our_attention_is_preferred_and_tritons_can_be_asked_for() -> None:
    assert volta.choose_attention(None, 128).choice == "CUSTOM"
    assert volta.choose_attention("TRITON_ATTN", 128).choice == "TRITON_ATTN"
    assert volta.choose_attention(None, 112).choice == "TRITON_ATTN"


def test_the_users_attention_is_taken() -> None:
    assert volta.choose_attention("FLEX_ATTENTION", 64, ROWS).choice == "FLEX_ATTENTION"


def test_heads_that_no_attention_takes_are_refused() -> None:
    problem = volta.choose_attention(None, 80, ROWS[:1]).problem
    assert problem is not None
    assert "80" in problem


def test_every_attention_offered_is_one_of_vllms() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert {row.name for row in volta.ATTENTION} <= set(AttentionBackendEnum.__members__)


@pytest.mark.parametrize(
    ("ranks", "disabled", "links", "no_peers", "probe", "expected"),
    [
        (1, False, "pcie", False, None, "none"),
        (2, True, "nvlink", False, "", "NCCL"),
        (2, True, "pcie", True, None, "NCCL"),
        (2, False, "pcie", True, None, "host memory"),
        (2, False, "pcie", False, None, "host memory"),
        (2, False, "nvlink", True, None, "host memory"),
        (2, False, "nvlink", False, "GPU 0 to 1: 3 elements arrived changed", "host memory"),
        (2, False, "nvlink", False, "", "peer memory"),
        (2, False, "nvlink", False, None, "peer memory"),
    ],
)
def test_ranks_meet_in_peer_memory_only_where_nvlink_proved_right(
    ranks: int, disabled: bool, links: volta.Links, no_peers: bool, probe: str | None, expected: str
) -> None:
    chosen = volta.choose_all_reduce(ranks, disabled=disabled, links=links, no_peers=no_peers, probe=probe)
    assert chosen.choice == expected
    assert (probe or "") in chosen.reason


def test_a_failed_trial_leaves_all_reduces_to_nccl() -> None:
    kept = volta.keep_all_reduce("host memory", "rank 1: 3 of 5120 sums were wrong")
    assert kept.choice == "NCCL"
    assert "host memory" in kept.reason
    assert "rank 1: 3 of 5120" in kept.reason
    assert volta.keep_all_reduce("peer memory", "").choice == "peer memory"


def given(**changes: Any) -> dict[str, Any]:
    usual = {
        "dtype": "float16",
        "model_type": "qwen3",
        "kv_cache_dtype": "auto",
        "kv_directive": "auto",
        "attention_backend": None,
        "head_size": 128,
        "ranks": 2,
        "nvlink": False,
        "no_peers": True,
        "disable_custom_all_reduce": True,
        "enforce_eager": True,
        "hybrid": False,
        "recording_disabled": False,
    }
    return usual | changes


def test_deciding_needs_the_standard_library_alone() -> None:
    """-S leaves out site-packages: neither torch nor vLLM can be imported."""
    subprocess.run([sys.executable, "-S", "-c", "import engine.volta"], check=True, cwd=ROOT)


def test_all_decisions_that_need_no_gpu_are_explained() -> None:
    told = {choice.what: choice for choice in volta.explain(given(enforce_eager=False))}
    assert set(told) == {"dtype", "KV cache dtype", "attention backend", "all-reduce", "CUDA graphs"}
    assert told["CUDA graphs"].choice != "off"
    assert all(choice.reason for choice in told.values())
