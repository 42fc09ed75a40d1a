"""The Gated DeltaNet layer: what it hands the ops of a step's metadata, and what it refuses.

What it computes is seen through the whole engine in tests/e2e/test_hybrid_model.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from engine.layers import gdn
from engine.layers.gdn import NO_REQUEST, Builder, GatedDeltaNet
from quant.errors import QuantError

KEY_HEADS, VALUE_HEADS, DIM, SLOTS = 1, 2, 16, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM


def layer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GatedDeltaNet:
    """A layer that vLLM's constructor has left with these attributes, on a rank of one."""
    attributes = {
        "prefix": "model.layers.0.linear_attn",
        "tp_size": 1,
        "num_k_heads": KEY_HEADS,
        "num_v_heads": VALUE_HEADS,
        "head_k_dim": DIM,
        "head_v_dim": DIM,
        "conv_kernel_size": 4,
        "activation": "silu",
        "state_dtypes": (torch.float32, torch.float32),
    } | changes

    def construct(self: Any, *_arguments: Any, **_options: Any) -> None:
        torch.nn.Module.__init__(self)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.conv1d = SimpleNamespace(weight=torch.ones(CHANNELS, 1, 4), quant_method=object())
        self.A_log = torch.nn.Parameter(torch.zeros(VALUE_HEADS))
        self.kv_cache = (torch.zeros(SLOTS, 3, CHANNELS), torch.zeros(SLOTS, VALUE_HEADS, DIM, DIM))

    monkeypatch.setattr(QwenGatedDeltaNetAttention, "__init__", construct)
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "get_state_dtype", lambda self: self.state_dtypes)
    model = SimpleNamespace(dtype=changes.get("dtype", torch.float32))
    config = SimpleNamespace(model_config=model, speculative_config=changes.get("speculative_config"))
    return GatedDeltaNet(SimpleNamespace(), config)


def run(
    monkeypatch: pytest.MonkeyPatch, made: GatedDeltaNet, rows: int, metadata: SimpleNamespace | None
) -> torch.Tensor:
    """The output of a step of `rows` rows, NaN where nothing was written."""
    step = None if metadata is None else {made.prefix: metadata}
    monkeypatch.setattr(gdn, "get_forward_context", lambda: SimpleNamespace(attn_metadata=step))
    random = torch.Generator().manual_seed(0)
    out = torch.full((rows, VALUE_HEADS, DIM), torch.nan)
    gates = torch.zeros(rows, VALUE_HEADS)
    made._forward_core(torch.randn(rows, CHANNELS, generator=random), gates, gates, out)
    return out


def metadata(
    slots: list[int], tokens: int, starts: list[int] | None = None, continued: list[bool] | None = None
) -> Any:
    return SimpleNamespace(
        num_actual_tokens=tokens,
        num_prefills=0 if starts is None else 1,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
        non_spec_query_start_loc=None if starts is None else torch.tensor(starts, dtype=torch.int32),
        has_initial_state=None if continued is None else torch.tensor(continued),
    )


def test_a_decoding_step_fills_its_rows_and_those_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(monkeypatch)
    out = run(monkeypatch, made, 3, metadata([2, 0], 2))
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()
    assert [bool(state.any()) for state in made.kv_cache[1]] == [True, False, True, False]


def test_rows_padded_beyond_the_requests_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a captured graph of more tokens than there are requests: without slots, or with negative ones."""
    out = run(monkeypatch, layer(monkeypatch), 4, metadata([1], 4))
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()
    out = run(monkeypatch, layer(monkeypatch), 4, metadata([1, -1, -1, -1], 4))
    assert out[0].any()
    assert not out[1:].any()


def test_prompts_and_decoding_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(monkeypatch)
    first = run(monkeypatch, made, 1, metadata([3], 1))
    made.kv_cache[1][1] = 7  # of a request that is gone
    mixed = run(monkeypatch, made, 4, metadata([3, 1, 9], 4, [0, 1, 4], [True, False]))
    assert mixed.isfinite().all()
    alone = layer(monkeypatch)
    assert torch.equal(run(monkeypatch, alone, 1, metadata([3], 1)), first)
    again = run(monkeypatch, alone, 4, metadata([3, 1], 4, [0, 1, 4], [True, True]))  # its slots hold zeros
    assert torch.equal(mixed, again)


def test_a_trial_run_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(monkeypatch)
    assert run(monkeypatch, made, 2, None).isnan().all()
    assert not made.kv_cache[1].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_config": object()}, "no speculative decoding.*--speculative-config"),
        ({"dtype": torch.bfloat16}, "--dtype float32 on this device"),
        ({"state_dtypes": (torch.float32, torch.float16)}, "float32 states.*--mamba-ssm-cache-dtype float32"),
        ({"conv_kernel_size": 3}, "over 4 tokens"),
        ({"head_v_dim": 32}, "keys and values of one size"),
        ({"activation": "relu"}, "SiLU"),
    ],
)
def test_a_layer_that_the_kernels_do_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantError, match=rf"model\.layers\.0\.linear_attn: .*{message}"):
        layer(monkeypatch, **changes)


def test_the_gate_s_bias_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(monkeypatch)
    assert made.dt_bias.dtype == torch.float32
    assert made.conv1d.quant_method is None


def builder(made: GatedDeltaNet, *, graphs: bool) -> Builder:
    """The builder of the metadata of one layer, for up to four requests."""
    mode = CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
    compilation = SimpleNamespace(
        cudagraph_mode=mode, max_cudagraph_capture_size=4, static_forward_context={made.prefix: made}
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        additional_config={},
    )
    spec = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    assert made.get_attn_backend().get_builder_cls() is Builder
    return Builder(spec, [made.prefix], config, torch.device("cpu"))


def batch(tokens: list[int], lengths: list[int], slots: list[int]) -> CommonAttentionMetadata:
    """Of requests with so many tokens in this step and in all; no tokens: a row of padding."""
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(tokens),
        num_actual_tokens=len(tokens) if max(tokens) == 1 else sum(tokens),
        max_query_len=max(tokens),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(slots, dtype=torch.int32)[:, None],
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_a_first_token_that_comes_alone_starts_from_zeroed_states(
    monkeypatch: pytest.MonkeyPatch, *, graphs: bool
) -> None:
    """vLLM's metadata calls that decoding. The slot's last owner leaves no trace, and other slots keep theirs."""
    made = layer(monkeypatch)
    for states in made.kv_cache:
        states.fill_(7)
    step = builder(made, graphs=graphs).build(0, batch([1, 1, 1], [5, 1, 1], [3, 1, 2]))
    assert step.num_prefills == 0
    for states in made.kv_cache:
        assert [states[slot].unique().tolist() for slot in range(SLOTS)] == [[7], [0], [0], [7]]


def test_a_first_token_beside_prompts_is_left_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(monkeypatch)
    made.kv_cache[1].fill_(7)
    step = builder(made, graphs=False).build(0, batch([1, 1, 3], [5, 1, 3], [3, 1, 2]))
    assert step.has_initial_state.tolist() == [True, False, False]
    assert made.kv_cache[1].unique().tolist() == [7]


def test_padding_of_a_graph_gets_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives it the null block 0, which would be read and written once per row."""
    step = builder(layer(monkeypatch), graphs=True).build(0, batch([1, 1, 0, 0], [5, 9, 0, 0], [3, 1, 0, 0]))
    assert step.non_spec_state_indices_tensor.tolist() == [3, 1, NO_REQUEST, NO_REQUEST]
