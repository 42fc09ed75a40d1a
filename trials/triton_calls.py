"""Calls of vLLM's functions that launch Triton kernels, as a step on a V100 makes them, on CPU tensors.

`on_path` are those that no kernel of ours replaces; `replaced` are those that ours do. Sizes are one rank's of the 27B
at TP=2: 8 key and 24 value heads of 128, 12 query and 2 key/value heads of 256. Mamba-2 and experts have Nemotron-H's.
Functions that look at the device before they launch are left out; their kernel is launched as they do on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Calls = dict[str, Callable[[], Any]]

PROCESSORS = 80  # of a V100
TOKENS, REQUESTS, VOCABULARY, DRAFTS, BLOCK = 128, 2, 151_936, 3, 16
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 8, 24, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
QUERY_HEADS, KV_HEADS, HEAD_DIM = 12, 2, 256
SSM_HEADS, SSM_DIM, SSM_GROUPS, SSM_STATE, SSM_CHUNK = 32, 64, 4, 128, 128
EXPERTS, TOP_K, EXPERT_HIDDEN, EXPERT_WIDTH = 128, 6, 2688, 928


def half(*shape: int) -> torch.Tensor:
    """float16 zeros."""
    return torch.zeros(shape, dtype=torch.float16)


def integers(*values: int) -> torch.Tensor:
    """An int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


def ids(*shape: int) -> torch.Tensor:
    """int32 zeros."""
    return torch.zeros(shape, dtype=torch.int32)


STARTS, SLOTS, CONTINUED = integers(0, 100, TOKENS), integers(0, 1), torch.tensor([False, True])


def on_path() -> Calls:
    """By where vLLM calls it."""
    return {**steps(), **sampling(), **drafts(), **attention(), **mamba_2(), **experts()}


def steps() -> Calls:
    """What prepares a step."""
    from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
    from vllm.v1.worker.block_table import _compute_slot_mapping_kernel
    from vllm.v1.worker.mamba_utils import batch_memcpy, postprocess_mamba_fused_kernel
    from vllm.v1.worker.utils import _zero_kv_blocks_kernel

    positions = torch.zeros(TOKENS, dtype=torch.int64)
    table, wide = ids(REQUESTS, 32), torch.zeros(REQUESTS, dtype=torch.int64)

    def slots() -> None:
        constants = (BLOCK, 1, 1, 0, 1, -1, 1024)
        _compute_slot_mapping_kernel[3,](TOKENS, 2048, STARTS, positions, table, 32, BLOCK, positions, *constants)

    def states() -> None:
        counts, bytes_ = ids(REQUESTS), torch.zeros(4, dtype=torch.int64)
        metadata = (bytes_, bytes_, ids(4), ids(4), ids(4), ids(4), ids(4), bytes_)
        postprocess_mamba_fused_kernel[REQUESTS, 4, 16](
            *(counts,) * 5, wide, 32, *metadata, counts, None, REQUESTS, BLOCK, 1024, False, TEMPORAL_TILES=16
        )

    def rotated() -> None:
        query, keys, angles = (
            half(TOKENS, QUERY_HEADS * HEAD_DIM),
            half(TOKENS, KV_HEADS * HEAD_DIM),
            half(3, TOKENS, 32),
        )
        triton_mrope(query, keys, angles, angles, [11, 11, 10], HEAD_DIM, 64, True, True)

    return {
        "every step: slots of tokens": slots,
        "new blocks of a cache that is read before it is written": lambda: _zero_kv_blocks_kernel[2, 4, 2](
            wide, wide, wide, wide, BLOCK_SIZE=1024
        ),
        "prefixes of hybrids: states copied": lambda: batch_memcpy(wide, wide, ids(REQUESTS)),
        "prefixes of hybrids: states kept after a step": states,
        "every step with images: rotary positions": rotated,
    }


def sampling() -> Calls:
    """Eight requests or more with top-k or top-p."""
    from vllm.v1.sample.ops import topk_topp_triton as filters

    logits, sigmas = torch.zeros(8, VOCABULARY), torch.tensor(filters._NORMAL_CDF_TO_SIGMA_TABLE)
    deviations = torch.tensor(filters._PERCENTILE_TO_STD_TABLE)

    def filtered(*, top_k: bool, top_p: bool) -> None:
        k, p = ids(8) if top_k else logits, torch.ones(8) if top_p else logits
        filters._topk_topp_kernel[8,](
            logits,
            VOCABULARY,
            torch.zeros(8, VOCABULARY),
            deviations,
            sigmas,
            k,
            p,
            BATCH_SIZE=8,
            MASK_VALUE=float("-inf"),
            VOCAB_SIZE=VOCABULARY,
            BLOCK_SIZE=8192,
            BLOCK_SIZE_TRUNC=4096,
            TOPK_ENABLED=top_k,
            TOPP_ENABLED=top_p,
            num_warps=8,
        )

    return {
        "sampling: top-k and top-p": lambda: filtered(top_k=True, top_p=True),
        "sampling: top-k": lambda: filtered(top_k=True, top_p=False),
        "sampling: top-p": lambda: filtered(top_k=False, top_p=True),
    }


def drafts() -> Calls:
    """Speculative decoding."""
    from vllm.v1.sample import rejection_sampler as rejection
    from vllm.v1.spec_decode import utils

    tokens = REQUESTS * DRAFTS
    ends, chosen, out = integers(DRAFTS, tokens), ids(tokens), ids(REQUESTS, DRAFTS + 1)
    chances, greedy = torch.zeros(tokens, VOCABULARY), torch.tensor([True, False])
    best, uniform = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.float64)
    positions, table, flags = torch.zeros(TOKENS, dtype=torch.int64), ids(REQUESTS, 32), torch.zeros(TOKENS).bool()

    def at_random() -> None:
        inputs = (out, ends, chosen, None, chances, ids(REQUESTS, 1), chosen, uniform, greedy, DRAFTS, VOCABULARY, None)
        rejection.rejection_random_sample_kernel[REQUESTS,](*inputs, NO_DRAFT_PROBS=True, SYNTHETIC_MODE=False)

    def recovered() -> None:
        inputs = (chosen, ends, chosen, None, chances, torch.zeros(REQUESTS, VOCABULARY), VOCABULARY, 8192)
        rejection.sample_recovered_tokens_kernel[REQUESTS, DRAFTS](*inputs, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False)

    def following() -> None:
        utils.eagle_prepare_next_token_padded_kernel[REQUESTS,](
            out, greedy, ids(REQUESTS), ids(REQUESTS), ids(REQUESTS), VOCABULARY, 4, REQUESTS, 4, BLOCK_SIZE_TOKENS=4
        )

    def draft_inputs() -> None:
        masks, mapping = (flags, flags), (chosen, ids(TOKENS))
        utils.copy_and_expand_eagle_inputs_kernel[REQUESTS, 1](
            ids(TOKENS),
            positions,
            SLOTS,
            ids(TOKENS),
            positions,
            *masks,
            *mapping,
            STARTS,
            SLOTS,
            0,
            0,
            TOKENS,
            1,
            True,
            256,
        )

    def blocks_of_drafts() -> None:
        outputs = (ids(TOKENS), positions, positions, positions, positions, chosen)
        sizes = (0, BLOCK, DRAFTS + 1, DRAFTS, TOKENS)
        utils.copy_and_expand_dflash_inputs_kernel[REQUESTS, 1](
            SLOTS, positions, *outputs, table, 32, STARTS, SLOTS, *sizes, BLOCK_SIZE=256, HAS_NUM_REJECTED=True
        )

    return {
        "drafts: kept, greedy": lambda: rejection.rejection_greedy_sample_kernel[REQUESTS,](
            out, ends, chosen, best, ids(REQUESTS, 1), greedy, DRAFTS, None, None, SYNTHETIC_MODE=False
        ),
        "drafts: kept, at random": at_random,
        "drafts: instead of a refused one": recovered,
        "drafts: a request's values for its tokens": lambda: rejection.expand_batch_to_tokens(ids(2), ends, tokens),
        "drafts: the model's next step": lambda: utils.eagle_step_update_slot_mapping_and_metadata(
            positions[:2], table, SLOTS, BLOCK, 4096, positions[:2], positions[:2]
        ),
        "drafts: after refused ones": lambda: utils.eagle_prepare_inputs_padded_kernel[REQUESTS,](
            ends, SLOTS, STARTS, SLOTS, SLOTS, REQUESTS
        ),
        "drafts: next tokens": following,
        "drafts: inputs": draft_inputs,
        "drafts: inputs of DFlash": blocks_of_drafts,
    }


def attention() -> Calls:
    """Layers that our kernels do not take: sinks, softcaps, other sizes of heads."""
    from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    cache, query = half(64, BLOCK, KV_HEADS, HEAD_DIM), half(TOKENS, QUERY_HEADS, HEAD_DIM)
    keys, lengths, one = half(TOKENS, KV_HEADS, HEAD_DIM), integers(100, 28), torch.ones(1)

    def attend(attended: torch.Tensor, ends: torch.Tensor, longest: int) -> None:
        segments = torch.zeros(len(attended), QUERY_HEADS, 16, HEAD_DIM)
        sums = torch.zeros(len(attended), QUERY_HEADS, 16)
        of_all = (attended, cache, cache, torch.empty_like(attended), ends, longest, lengths, 100, HEAD_DIM**-0.5, True)
        rest = ((-1, -1), ids(REQUESTS, 32), 0, None, None, None, 128, 16, segments, sums, sums)
        unified_attention(*of_all, *rest)

    def encode(head: int) -> None:
        x = half(TOKENS, QUERY_HEADS, head)
        context_attention_fwd(x, x, x, torch.empty_like(x), STARTS[:2], lengths, 100, False, head**-0.5)

    return {
        "attention that ours does not take: cache": lambda: triton_reshape_and_cache_flash(
            keys, keys, cache, cache, torch.zeros(TOKENS, dtype=torch.int64), "auto", one, one
        ),
        "attention that ours does not take: decoding": lambda: attend(query[:2], integers(0, 1, 2), 1),
        "attention that ours does not take: prompts": lambda: attend(query, STARTS, 100),
        **{f"attention without a cache: encoders, heads of {head}": partial(encode, head) for head in (64, 128, 256)},
    }


def mamba_2() -> Calls:
    """Nemotron-H and its like."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from vllm.model_executor.layers.mamba.ops.gather_initial_states import _gather_initial_states_kernel
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    channels = SSM_HEADS * SSM_DIM + 2 * SSM_GROUPS * SSM_STATE
    x, weight, bias = half(TOKENS, channels), half(channels, TAPS), half(channels)
    window = half(4, TAPS - 1, channels).transpose(1, 2)
    values, groups = half(TOKENS, SSM_HEADS, SSM_DIM), half(TOKENS, SSM_GROUPS, SSM_STATE)
    states, per_head = half(4, SSM_HEADS, SSM_DIM, SSM_STATE), half(SSM_HEADS)
    decay, rows = torch.zeros(SSM_HEADS), SSM_DIM * SSM_STATE * SSM_HEADS

    def wide(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        return tensor.view(*tensor.shape, *(1,) * len(shape)).expand(*tensor.shape, *shape)

    def scanned() -> None:
        mamba_chunk_scan_combined_varlen(
            values,
            half(TOKENS, SSM_HEADS),
            decay,
            groups,
            groups,
            SSM_CHUNK,
            cu_seqlens=STARTS,
            cu_chunk_seqlens=STARTS,
            last_chunk_indices=SLOTS,
            seq_idx=SLOTS,
            out=torch.empty_like(values),
            D=per_head,
            dt_bias=per_head,
            initial_states=states[:2],
            dt_softplus=True,
            state_dtype=torch.float16,
        )

    def updated() -> None:
        selective_state_update(
            states,
            values[:2],
            wide(half(2, SSM_HEADS), SSM_DIM),
            wide(decay, SSM_DIM, SSM_STATE),
            groups[:2],
            groups[:2],
            wide(per_head, SSM_DIM),
            wide(per_head, SSM_DIM),
            dt_softplus=True,
            state_batch_indices=SLOTS,
            out=torch.empty_like(values[:2]),
        )

    return {
        "Mamba-2: convolution of prompts": lambda: causal_conv1d_fn(
            x.T, weight, bias, window, STARTS, cache_indices=SLOTS, has_initial_state=CONTINUED, activation="silu"
        ),
        "Mamba-2: convolution": lambda: causal_conv1d_update(
            x[:2], window, weight, bias, "silu", conv_state_indices=SLOTS
        ),
        "Mamba-2: states of prompts that continue": lambda: _gather_initial_states_kernel[256, 2](
            states,
            SLOTS,
            CONTINUED,
            states[:2],
            states.stride(0),
            1,
            1,
            row_size=rows,
            BLOCK_SIZE=1024,
            launch_pdl=False,
        ),
        "Mamba-2: scan of prompts": scanned,
        "Mamba-2: state": updated,
        "Mamba-2: gated norm": lambda: rms_norm_gated(
            half(TOKENS, 2048), half(2048), None, z=half(TOKENS, 2048), group_size=512, norm_before_gate=False
        ),
    }


def experts() -> Calls:
    """Experts in 16 bits; those in NVFP4 are ours."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config, invoke_fused_moe_triton_kernel
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
    from vllm.model_executor.models.gemma4 import gemma4_fused_routing_kernel_triton
    from vllm.triton_utils import tl

    up = half(EXPERTS, EXPERT_WIDTH, EXPERT_HIDDEN)

    def multiplied(tokens: int) -> None:
        tiles = get_default_config(tokens, EXPERTS, EXPERT_WIDTH, EXPERT_HIDDEN, TOP_K, None)
        slots = ids(tokens * TOP_K + EXPERTS * tiles["BLOCK_SIZE_M"])
        routed = (torch.ones(tokens, TOP_K), slots, ids(len(slots) // tiles["BLOCK_SIZE_M"]), ids(1), False, TOP_K)
        x, y = half(tokens, EXPERT_HIDDEN), half(tokens, TOP_K, EXPERT_WIDTH)
        invoke_fused_moe_triton_kernel(x, up, y, None, None, *routed, tiles, tl.float16, *(False,) * 5)

    return {
        "experts in 16 bits: a few tokens": lambda: multiplied(8),
        "experts in 16 bits: prompts": lambda: multiplied(2048),
        "experts in 16 bits: their sum": lambda: moe_fused_mul_sum(half(8, TOP_K, EXPERT_HIDDEN), torch.ones(8, TOP_K)),
        "experts of Gemma 4: their choice": lambda: gemma4_fused_routing_kernel_triton(
            half(8, EXPERTS), TOP_K, torch.ones(EXPERTS)
        ),
    }


def replaced() -> Calls:
    """Gated DeltaNet's layers (engine/layers/gdn.py), by phase."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fused_gdn_gating
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from vllm.third_party.flash_linear_attention import ops
    from vllm.third_party.flash_linear_attention.ops import layernorm_guard

    layernorm_guard.num_compute_units = lambda *_: PROCESSORS
    x, weight, gates = half(TOKENS, CHANNELS), half(CHANNELS, TAPS), half(TOKENS, VALUE_HEADS)
    window = half(4, TAPS - 1, CHANNELS).transpose(1, 2)
    state, decay, bias = torch.zeros(4, VALUE_HEADS, DIM, DIM), torch.zeros(VALUE_HEADS), half(VALUE_HEADS)
    q, k, v = (half(1, TOKENS, heads, DIM) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS))
    g, beta = torch.zeros(1, TOKENS, VALUE_HEADS), half(1, TOKENS, VALUE_HEADS)
    rows = half(TOKENS * VALUE_HEADS, DIM)

    def decoded() -> None:
        out = half(2, 1, VALUE_HEADS, DIM)
        inputs = (x[:2], gates[:2], gates[:2], decay, bias, DIM**-0.5, state, out, SLOTS)
        ops.fused_recurrent_gated_delta_rule_packed_decode(*inputs, use_qk_l2norm_in_kernel=True)

    def of_drafts() -> None:
        ops.fused_sigmoid_gating_delta_rule_update(
            A_log=decay,
            a=gates,
            b=gates,
            dt_bias=bias,
            q=q,
            k=k,
            v=v,
            initial_state=state,
            cu_seqlens=STARTS,
            ssm_state_indices=SLOTS[:, None].repeat(1, TOKENS).contiguous(),
            num_accepted_tokens=integers(1, 1),
            use_qk_l2norm_in_kernel=True,
        )

    def of_prompts() -> None:
        ops.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state[:2],
            output_final_state=True,
            cu_seqlens=STARTS,
            use_qk_l2norm_in_kernel=True,
        )

    return {
        "decoding: convolution": lambda: causal_conv1d_update(
            x[:2], window, weight, None, "silu", conv_state_indices=SLOTS
        ),
        "decoding: delta rule": decoded,
        "prefill: convolution": lambda: causal_conv1d_fn(
            x.T, weight, None, window, STARTS, cache_indices=SLOTS, has_initial_state=CONTINUED, activation="silu"
        ),
        "prefill: gates": lambda: fused_gdn_gating(decay, gates, gates, bias),
        "prefill: heads": lambda: ops.fused_post_conv_prep(x, gates, gates, decay, bias, KEY_HEADS, DIM, DIM),
        "prefill: delta rule": of_prompts,
        "speculative decoding: delta rule": of_drafts,
        "every step: gated norm": lambda: layernorm_guard.rmsnorm_fn(rows, half(DIM), None, z=rows),
    }
