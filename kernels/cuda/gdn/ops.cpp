// The ops of a Gated DeltaNet layer on CUDA tensors. The contract is contracts/gdn.h; here keys and values have 32, 64 or 128
// dimensions.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "bindings/gdn_arguments.h"
#include "cuda/common/binding.h"
#include "cuda/gdn/launch.h"

namespace {

using namespace voltserve;

constexpr int kAlignment = 16;  // bytes; of what is read 16 at a time

void expect_aligned(const char *name, const Tensor &tensor, int64_t stride, int64_t element, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const bool apart = tensor.size(0) > 1;  // otherwise the stride says nothing
  STD_TORCH_CHECK(address % bytes == 0 && (!apart || stride * element % bytes == 0), name,
                  ": expected rows that start at multiples of ", bytes, " bytes, got rows ", stride * element,
                  " bytes apart from address ", address);
}

Tensor causal_conv1d(Tensor x, Tensor weight, Tensor state, Tensor slots, std::optional<Tensor> starts,
                     std::optional<Tensor> continued) {
  const Call call("x", x);
  Conv1d<__half> conv = conv_of<__half>(x, weight, state, call.place, ScalarType::Half);
  const Requests requests = requests_of(slots, starts, continued, call.place, x.size(0));
  expect_multiple("x", "C", conv.channels, 2);
  expect_aligned("x", x, conv.x_stride, sizeof(__half), sizeof(__half2));
  expect_aligned("state", state, conv.state_stride, sizeof(__half), sizeof(__half2));
  expect_aligned("weight", weight, 0, sizeof(__half), kAlignment);
  Tensor y = torch::stable::new_empty(x, {x.size(0), conv.channels});
  conv.y = data<__half>(y);
  check(launch_causal_conv1d(conv, requests, static_cast<int>(x.size(0)), call.stream), "causal_conv1d");
  return y;
}

void gated_delta_rule(Tensor qkv, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor state, Tensor slots,
                      std::optional<Tensor> starts, std::optional<Tensor> continued, int64_t key_heads, Tensor out) {
  const Call call("qkv", qkv);
  const DeltaRule<__half> rule = rule_of<__half>(qkv, a, b, a_log, dt_bias, state, key_heads, out, call.place, ScalarType::Half);
  const Requests requests = requests_of(slots, starts, continued, call.place, qkv.size(0));
  STD_TORCH_CHECK(rule.dim == 32 || rule.dim == 64 || rule.dim == 128, "state: expected K = 32, 64 or 128, got ", rule.dim);
  expect_aligned("qkv", qkv, rule.qkv_stride, sizeof(__half), 4 * sizeof(__half));
  expect_aligned("state", state, rule.state_stride, sizeof(float), kAlignment);
  check(launch_gated_delta_rule(rule, requests, call.stream), "gated_delta_rule");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
}
