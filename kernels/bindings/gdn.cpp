// The ops of a Gated DeltaNet layer: their schemas, whatever devices the build is for, and the ops on the CPU. The contract is
// contracts/gdn.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "bindings/gdn_arguments.h"

namespace {

using namespace voltserve;
using namespace voltserve::cpu;

Tensor causal_conv1d(Tensor x, Tensor weight, Tensor state, Tensor slots, std::optional<Tensor> starts,
                     std::optional<Tensor> continued) {
  Conv1d<float> conv = conv_of<float>(x, weight, state, kCpu, ScalarType::Float);
  const Requests requests = requests_of(slots, starts, continued, kCpu, x.size(0));
  expect_slots(requests, state.size(0));
  expect_multiple("x", "C", conv.channels, kGdnWidth);
  Tensor y = torch::stable::new_empty(x, {x.size(0), conv.channels});
  conv.y = static_cast<float *>(y.mutable_data_ptr());
  parallel_for(conv.channels / kGdnWidth, grain(kConvTaps * kGdnWidth * x.size(0)),
               [&](int64_t begin, int64_t end) { chosen()->causal_conv1d(conv, requests, begin * kGdnWidth, end * kGdnWidth); });
  return y;
}

void gated_delta_rule(Tensor qkv, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor state, Tensor slots,
                      std::optional<Tensor> starts, std::optional<Tensor> continued, int64_t key_heads, Tensor out) {
  const DeltaRule<float> rule = rule_of<float>(qkv, a, b, a_log, dt_bias, state, key_heads, out, kCpu, ScalarType::Float);
  const Requests requests = requests_of(slots, starts, continued, kCpu, qkv.size(0));
  expect_slots(requests, state.size(0));
  expect_multiple("state", "K", rule.dim, kGdnWidth);
  STD_TORCH_CHECK(rule.dim <= kMaxGdnDim, "state: expected K at most ", kMaxGdnDim, ", got ", rule.dim);
  const int64_t tokens = std::max<int64_t>(qkv.size(0) / std::max<int64_t>(requests.count, 1), 1);
  parallel_for(requests.count * rule.value_heads, grain(4 * rule.dim * rule.dim * tokens),
               [&](int64_t begin, int64_t end) { chosen()->gated_delta_rule(rule, requests, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor(a!) state, Tensor slots, Tensor? starts=None, Tensor? continued=None) -> "
      "Tensor");
  m.def(
      "gated_delta_rule(Tensor qkv, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) state, Tensor slots, Tensor? "
      "starts, Tensor? continued, int key_heads, Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
}
