// The schemas of the attention ops (contracts/attention.h), known on every device so that they can be traced and tested; what runs
// them is in cuda/attention/ops.cpp.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, int "
      "decode_query_len, int max_query_len, float scale, int window, float soft_cap, Tensor(a!) out) -> ()");
  m.def("reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  m.def(
      "rotate_and_cache(Tensor(a!) q, Tensor key, Tensor value, Tensor positions, Tensor cos_sin, bool halves, Tensor? q_weight, "
      "Tensor? k_weight, float eps, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots) -> ()");
}
