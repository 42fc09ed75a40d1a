"""vLLM's operators that nothing here computes. Each has its reason: no served model calls it, or such models are
refused.

A name that vLLM's Python calls is in engine/operators/table.py, or here. tests/engine/operators/test_calls.py reads
vLLM's source and checks this. So each name that a new release adds is looked at. `*` stands for the rest of a name.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Absent:
    """Operators that are absent for one reason. `remedy`: what to do if one is called all the same."""

    reason: str
    remedy: str
    names: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Whether `name`, with its namespace, is one of them."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)


_REPORT = "Report this with the model's name and the engine's flags"

ABSENT = (
    Absent(
        "it quantizes activations to 8 or 4 bits, for tensor cores that a V100 lacks",
        "Serve a checkpoint in a format that `voltserve verify` accepts, with --kv-cache-dtype auto",
        (
            "_C.*_fp8_quant*",
            "_C.*_int8_quant",
            "_C.*_fp4_quant",
            "_C.*_fp4_experts_quant",
            "_C.*_nvfp4_quant",
            "_C.mxfp4_*",
            "_C.rms_norm_*_quant",
            "_C.silu_and_mul_*quant",
            "_C.per_token_group_*",
            "_C.persistent_masked_m_silu_mul_quant",
            "_C.hadacore_transform",
            "_qutlass_C.*",
            "_C_cache_ops.convert_fp8",
        ),
    ),
    Absent(
        "it multiplies quantized matrices on compute capability 7.5 or newer, which the platform does not report",
        "Serve a checkpoint in a format that `voltserve verify` accepts",
        (
            "_C.cutlass_*mm",
            "_C.cutlass_scaled_mm_azp",
            "_C.cutlass_pack_*",
            "_C.cutlass_encode_*",
            "_C.get_cutlass_*",
            "_C.machete_*",
            "_C.marlin_*",
            "_C.gptq_marlin_repack",
            "_C.awq_marlin_repack",
            "_C.allspark_*",
            "_C.rearrange_kn_weight_as_n32k16_order",
            "_C.permute_cols",
            "_moe_C.moe_wna16_marlin_gemm",
            "_moe_C.shuffle_rows",
            "_moe_C.moe_permute*",
            "_moe_C.moe_unpermute",
            "_C.masked_situ_and_mul",
            "_moe_C.batched_moe_align_block_size",
        ),
    ),
    Absent(
        "it multiplies matrices in a format that is refused before the engine starts (quant/formats/others.py)",
        "Convert the checkpoint with `voltserve quantize`",
        ("_C.gptq_gemm", "_C.gptq_shuffle", "_C.awq_gemm", "_C.awq_dequantize", "_moe_C.moe_wna16_gemm"),
    ),
    Absent(
        "it is for compute capability 9.0 or newer, which vLLM asks for before it calls it",
        _REPORT,
        (
            "_C.dsv3_fused_a_gemm",
            "_moe_C.dsv3_router_gemm",
            "_C.fp32_router_gemm",
            "_C.sm100_*",
            "_C.cooperative_topk",
            "_C.direct_dcp_*",
            "_C.fused_kda_decode",
            "_C.kimi_k3_attn_res",
            "_C.fused_gdn_decode_post_conv_mtp",
        ),
    ),
    Absent(
        "it belongs to multi-head latent or sparse attention, which engine/operators/check.py refuses",
        "Serve a model with ordinary attention",
        (
            "_C_cache_ops.concat_*",
            "_C_cache_ops.gather_and_maybe_dequant_cache",
            "_C_cache_ops.cp_gather_*",
            "_C_cache_ops.indexer_k_quant_and_cache",
            "_C.top_k_per_row_*",
            "_C.persistent_topk",
            "_C.fused_deepseek_v4_*",
            "_C.fused_kimi_k3_*",
            "_C.mla_decode_kvcache",
            "_C.ngram_compute_n_gram_ids",
        ),
    ),
    Absent(
        "engine/operators/check.py refuses the one kind of model, or the flag, that needs it",
        "Serve another model, or leave the flag out",
        (
            "_C.fused_minimax_m3_qknorm_rope_kv_insert",
            "_C.selective_scan_fwd",
            "_moe_C.moe_lora_align_block_size",
            "_C_cache_ops.swap_blocks*",
        ),
    ),
    Absent(
        "FlashAttention, FlashInfer and attention on ROCm call it; none of them is a backend here",
        "Leave out --attention-backend",
        ("_C.merge_attn_states", "_C_cache_ops.reshape_and_cache"),
    ),
    Absent(
        "a pass of vLLM's compiler puts it into steps, and none runs: steps are recorded or eager",
        "Leave out --compilation-config",
        ("_C.fused_qk_norm_rope",),
    ),
    Absent(
        "vLLM's own all-reduce calls it, in whose place engine/collective is",
        _REPORT,
        ("_C_custom_ar.*", "_C_cuda_utils.get_device_attribute"),
    ),
    Absent(
        "vLLM's layers and attention for CPUs call it, in whose place engine/cpu and engine/layers are",
        _REPORT,
        (
            "_C.cpu_attn_*",
            "_C.cpu_attention_with_kv_cache",
            "_C.get_scheduler_metadata",
            "_C.cpu_fused_moe*",
            "_C.prepack_moe_weight*",
            "_C.fused_experts_cpu",
            "_C.dynamic_4bit_int_moe",
            "_C.chunk_gated_delta_rule_cpu",
            "_C.fused_gdn_gating_cpu",
            "_C.fused_sigmoid_gating_delta_rule_update_*cpu",
            "_C.causal_conv1d_fwd_cpu",
            "_C.causal_conv1d_update_cpu",
        ),
    ),
    Absent(
        "vLLM asks whether it is there before it uses it, and has or gets another way (engine/patches.py for AMX)",
        _REPORT,
        (
            "_C.convert_*",
            "_C.weight_packed_linear",
            "_C.causal_conv1d_weight_pack",
            "_C.*onednn*",
            "_C.release_dnnl_matmul_handler",
            "_C.int8_scaled_mm_with_quant",
            "_C.int4_scaled_mm_cpu",
            "_C.fp8_scaled_mm_cpu",
            "_C.cpu_gemm_wna16",
            "_C.*shm_*",
            "_C.activation_lut_bf16",
            "_C.gelu_tanh",
        ),
    ),
    Absent(
        "it is for other devices than NVIDIA's GPUs and x86 CPUs",
        _REPORT,
        ("_rocm_C.*", "_xpu_C.*", "_C.*xpu*", "_C_cache_ops.getMemoryInfo"),
    ),
)

# Modules that are imported and never run take these by name: passes of vLLM's compiler. They have a schema, and say
# their reason when they are called.
NAMED = (
    "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) residual, Tensor weight, "
    "Tensor scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, "
    "Tensor? scale_ub, Tensor(c!)? residual) -> ()",
    "rms_norm_per_block_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, "
    "Tensor? scale_ub, Tensor(c!)? residual, int group_size, bool is_scale_transposed) -> ()",
    "silu_and_mul_quant(Tensor(a!) result, Tensor input, Tensor scale) -> ()",
    "fused_qk_norm_rope(Tensor(a!) qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp=-1) -> ()",
)


def describe(name: str) -> str:
    """Why the operator `name` (with its namespace) is not here, and what to do, in one sentence each."""
    for absent in ABSENT:
        if absent.has(name):
            return f"{name}: vLLM calls an operator that voltserve does not compute: {absent.reason}. {absent.remedy}"
    return f"{name}: vLLM calls an operator that voltserve does not know (engine/operators). {_REPORT}"
