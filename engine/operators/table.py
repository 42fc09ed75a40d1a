"""The operators that vLLM's Python calls, and what computes each here.

`TABLE` lists each one on our path, with its schema and the function that computes it on any device. The schema is as
vLLM's own library declares it, so every call of vLLM's Python fits. Operators that nothing here computes are in
engine/operators/absent.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from engine.operators import activations, drafts, layers, mamba, routing


@dataclass(frozen=True)
class Operator:
    """One operator: `namespace::schema`, and the function that computes it."""

    namespace: str
    schema: str
    compute: Callable[..., Any]

    @property
    def name(self) -> str:
        """The operator's name without its namespace."""
        return self.schema.partition("(")[0]


LAYERS = (
    Operator("_C", "rms_norm(Tensor(a!) result, Tensor input, Tensor? weight, float epsilon) -> ()", layers.rms_norm),
    Operator(
        "_C",
        "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
        layers.fused_add_rms_norm,
    ),
    Operator(
        "_C",
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        layers.rotate,
    ),
    Operator(
        "_C",
        "apply_repetition_penalties_(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, "
        "Tensor repetition_penalties) -> ()",
        layers.repetition_penalties,
    ),
    Operator("_C", "weak_ref_tensor(Tensor(a) input) -> Tensor(a)", layers.weak_ref),
    Operator("_C", "get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor", layers.cuda_view),
    Operator(
        "_C_cache_ops",
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
        layers.reshape_and_cache_flash,
    ),
    Operator(
        "_C_cuda_utils",
        "get_max_shared_memory_per_block_device_attribute(int device_id) -> int",
        layers.shared_memory,
    ),
    *(
        Operator("_C", f"{name}(int cuda_device_capability) -> bool", layers.never)
        for name in (
            "cutlass_scaled_mm_supports_fp4",
            "cutlass_scaled_mm_supports_fp8",
            "cutlass_scaled_mm_supports_block_fp8",
            "cutlass_group_gemm_supported",
        )
    ),
)

ACTIVATIONS = (
    *(
        Operator("_C", f"{name}(Tensor(a!) {out}, Tensor input) -> ()", compute)
        for name, out, compute in (
            ("silu_and_mul", "result", activations.gated(functional.silu)),
            ("mul_and_silu", "out", activations.gated(functional.silu, gate_first=False)),
            ("gelu_and_mul", "out", activations.gated(functional.gelu)),
            ("gelu_tanh_and_mul", "out", activations.gated(activations.gelu_tanh)),
            # Two ways to write the same formula.
            ("gelu_new", "out", activations.alone(activations.gelu_tanh)),
            ("gelu_fast", "out", activations.alone(activations.gelu_tanh)),
            ("gelu_quick", "out", activations.alone(activations.quick_gelu)),
            ("relu_squared", "out", activations.relu_squared),
        )
    ),
    Operator(
        "_C",
        "silu_and_mul_with_clamp(Tensor(a!) result, Tensor input, float limit, float alpha=1.0, float beta=0.0) -> ()",
        activations.clamped_silu,
    ),
    Operator("_C", "fatrelu_and_mul(Tensor(a!) out, Tensor input, float threshold) -> ()", activations.fat_relu),
    Operator(
        "_C",
        "swigluoai_and_mul(Tensor(a!) out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
        activations.swiglu_oai,
    ),
    Operator(
        "_C",
        "situ_and_mul(Tensor(a!) out, Tensor input, float beta=1.0, float linear_beta=-1.0) -> ()",
        activations.situ,
    ),
)

_CHOSEN = "(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor(c!) token_expert_indices, Tensor gating_output, "

EXPERTS = (
    Operator(
        "_moe_C",
        f"topk_softmax{_CHOSEN}bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
        routing.topk_softmax,
    ),
    Operator(
        "_moe_C",
        f"topk_sigmoid{_CHOSEN}bool renormalize, Tensor? bias, float routed_scaling_factor, Tensor? is_padding) -> ()",
        routing.topk_sigmoid,
    ),
    Operator(
        "_moe_C",
        f"topk_softplus_sqrt{_CHOSEN}bool renormalize, float routed_scaling_factor, Tensor? bias, "
        "Tensor? input_ids, Tensor? tid2eid, Tensor? is_padding) -> ()",
        routing.topk_softplus_sqrt,
    ),
    Operator(
        "_moe_C",
        "grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, "
        "float routed_scaling_factor, Tensor bias, int scoring_func) -> (Tensor, Tensor)",
        routing.grouped_topk,
    ),
    Operator(
        "_moe_C",
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids, "
        "Tensor(b!) experts_ids, Tensor(c!) num_tokens_post_pad, Tensor? maybe_expert_map) -> ()",
        routing.align_block_size,
    ),
    Operator(
        "_moe_C",
        "moe_sum(Tensor input, Tensor(a!) output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
        routing.moe_sum,
    ),
)

# vLLM calls these on CPUs only.
CPU = (
    Operator("_C", "init_cpu_memory_env(SymInt[] node_ids) -> ()", layers.nothing),
    Operator(
        "_C",
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, SymInt block_size) -> ()",
        layers.slots_of,
    ),
    Operator(
        "_C",
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? conv_state_indices, Tensor? query_start_loc, SymInt pad_slot_id) -> Tensor",
        mamba.causal_conv1d_update,
    ),
    Operator(
        "_C",
        "selective_state_update_cpu(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
        "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices, "
        "SymInt null_block_id, Tensor(b!) out, Tensor? num_accepted_tokens, Tensor? cu_seqlens) -> ()",
        mamba.selective_state_update,
    ),
    Operator(
        "_C",
        "mamba_chunk_scan_fwd_cpu(Tensor(a!) out, Tensor(b!) final_states, Tensor x, Tensor dt, Tensor A, Tensor B, "
        "Tensor C, Tensor? D, Tensor? z, Tensor cu_seqlens) -> ()",
        mamba.chunk_scan,
    ),
)

# Speculative decoding on CPUs. The same kernels are Triton's on GPUs.
DRAFTS = (
    Operator(
        "_C",
        "rejection_greedy_sample_kernel_impl(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, "
        "Tensor draft_token_ids, Tensor target_argmax, Tensor bonus_token_ids, Tensor? is_greedy, "
        "SymInt max_spec_len) -> ()",
        drafts.keep_greedy,
    ),
    Operator(
        "_C",
        "rejection_random_sample_kernel_impl(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, "
        "Tensor draft_token_ids, Tensor? draft_probs, Tensor target_probs, Tensor bonus_token_ids, "
        "Tensor recovered_token_ids, Tensor uniform_probs, Tensor? is_greedy, SymInt max_spec_len, SymInt vocab_size, "
        "bool no_draft_probs) -> ()",
        drafts.keep_at_random,
    ),
    Operator(
        "_C",
        "sample_recovered_tokens_kernel_impl(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, "
        "Tensor draft_token_ids, Tensor? draft_probs, Tensor target_probs, Tensor inv_q, SymInt vocab_size, "
        "bool no_draft_probs) -> ()",
        drafts.recover,
    ),
    Operator(
        "_C",
        "expand_kernel_impl(Tensor(a!) output, Tensor input, Tensor cu_num_tokens, SymInt replace_from, "
        "SymInt replace_to) -> ()",
        drafts.expand,
    ),
    Operator(
        "_C",
        "eagle_prepare_inputs_padded_kernel_impl(Tensor cu_num_draft_tokens, Tensor valid_sampled_tokens_count, "
        "Tensor query_start_loc_gpu, Tensor(a!) token_indices_to_sample, Tensor(b!) num_rejected_tokens_gpu, "
        "SymInt num_reqs) -> ()",
        drafts.after_rejection,
    ),
    Operator(
        "_C",
        "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled_token_ids, Tensor discard_request_mask, "
        "Tensor backup_next_token_ids, Tensor(a!) next_token_ids, Tensor(b!) valid_sampled_tokens_count, "
        "SymInt vocab_size, SymInt num_sampled_tokens_per_req, SymInt num_reqs) -> ()",
        drafts.next_tokens,
    ),
    Operator(
        "_C",
        "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, "
        "Tensor(b!) out_clamped_positions, Tensor(c!) out_slot_mapping, SymInt block_size, SymInt max_model_len, "
        "SymInt PAD_ID) -> ()",
        drafts.next_step,
    ),
    Operator(
        "_C",
        "copy_and_expand_eagle_inputs_kernel_impl(Tensor target_token_ids, Tensor target_positions, "
        "Tensor next_token_ids, Tensor(a!) out_input_ids, Tensor(b!) out_positions, "
        "Tensor(c!) out_is_rejected_token_mask, Tensor(d!) out_is_masked_token_mask, Tensor(e!) out_new_token_indices, "
        "Tensor(f!) out_hidden_state_mapping, Tensor query_start_loc, Tensor query_end_loc, SymInt padding_token_id, "
        "SymInt parallel_drafting_token_id, SymInt total_input_tokens, SymInt num_padding_slots_per_request, "
        "bool shift_input_ids) -> ()",
        drafts.draft_inputs,
    ),
    Operator(
        "_C",
        "copy_and_expand_dflash_inputs_kernel_impl(Tensor next_token_ids, Tensor target_positions, "
        "Tensor(a!) out_input_ids, Tensor(b!) out_context_positions, Tensor(c!) out_query_positions, "
        "Tensor(d!) out_context_slot_mapping, Tensor(e!) out_query_slot_mapping, Tensor(f!) out_token_indices, "
        "Tensor block_table, Tensor query_start_loc, Tensor? num_rejected_tokens, SymInt parallel_drafting_token_id, "
        "SymInt block_size, SymInt num_query_per_req, SymInt num_speculative_tokens, SymInt total_input_tokens, "
        "bool has_num_rejected) -> ()",
        drafts.dflash_inputs,
    ),
)

TABLE = (*LAYERS, *ACTIVATIONS, *EXPERTS, *CPU, *DRAFTS)
