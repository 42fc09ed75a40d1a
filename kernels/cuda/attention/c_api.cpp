// The attention launchers as plain C, as c_api.cpp's are (tools/native_attention.py mirrors the structs).
#include <cstdio>
#include <exception>

#include "cuda/attention/launch.h"
#include "cuda/common/c_structs.h"

extern "C" {

// The structs of this interface (common/c_structs.h).
const char *voltserve_attention_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("Problem", sizeof(AttentionProblem),
               {AT(AttentionProblem, requests), AT(AttentionProblem, tokens), AT(AttentionProblem, decode_query_len),
                AT(AttentionProblem, max_query_len), AT(AttentionProblem, q_heads), AT(AttentionProblem, kv_heads),
                AT(AttentionProblem, head_dim), AT(AttentionProblem, processors)}) +
      describe("DecodeShape", sizeof(DecodeShape),
               {AT(DecodeShape, head_dim), AT(DecodeShape, row_warps), AT(DecodeShape, token_warps),
                AT(DecodeShape, blocks_per_processor)}) +
      describe(
          "PrefillShape", sizeof(PrefillShape),
          {AT(PrefillShape, head_dim), AT(PrefillShape, warps), AT(PrefillShape, tokens), AT(PrefillShape, blocks_per_processor)}) +
      describe(
          "Plan", sizeof(AttentionPlan),
          {AT(AttentionPlan, decode), AT(AttentionPlan, splits), AT(AttentionPlan, row_blocks), AT(AttentionPlan, partial_rows),
           AT(AttentionPlan, partial_floats), AT(AttentionPlan, arrival_words), AT(AttentionPlan, prefill),
           AT(AttentionPlan, prefill_tiles), AT(AttentionPlan, prefill_shared_bytes), AT(AttentionPlan, reason)}) +
      describe("AttentionArgs", sizeof(AttentionArgs), {AT(AttentionArgs, q),
                                                        AT(AttentionArgs, out),
                                                        AT(AttentionArgs, k_cache),
                                                        AT(AttentionArgs, v_cache),
                                                        AT(AttentionArgs, block_table),
                                                        AT(AttentionArgs, query_start),
                                                        AT(AttentionArgs, seq_lens),
                                                        AT(AttentionArgs, partial),
                                                        AT(AttentionArgs, arrivals),
                                                        AT(AttentionArgs, requests),
                                                        AT(AttentionArgs, q_heads),
                                                        AT(AttentionArgs, kv_heads),
                                                        AT(AttentionArgs, head_dim),
                                                        AT(AttentionArgs, q_stride),
                                                        AT(AttentionArgs, out_stride),
                                                        AT(AttentionArgs, table_stride),
                                                        AT(AttentionArgs, block_size),
                                                        AT(AttentionArgs, block_chunks),
                                                        AT(AttentionArgs, token_chunks),
                                                        AT(AttentionArgs, head_chunks),
                                                        AT(AttentionArgs, scale),
                                                        AT(AttentionArgs, soft_cap),
                                                        AT(AttentionArgs, window)});
  return text.c_str();
}

// Fills `plan`; on a bad problem writes why to `error` and returns 1.
int voltserve_plan_attention(const voltserve::AttentionProblem *problem, voltserve::AttentionPlan *plan, char *error,
                             size_t error_size) {
  try {
    *plan = voltserve::plan_attention(*problem);
    return 0;
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return 1;
  }
}

int voltserve_attention(const voltserve::AttentionArgs *args, const voltserve::AttentionPlan *plan, cudaStream_t stream) {
  return voltserve::launch_attention(*args, *plan, stream);
}

}  // extern "C"
