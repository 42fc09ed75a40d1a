// From tensors to the arguments of contracts/gdn.h, checked. Only bindings include it.
#pragma once

#include <optional>

#include "bindings/arguments.h"
#include "contracts/gdn.h"

namespace voltserve {

inline Requests requests_of(const Tensor &slots, const std::optional<Tensor> &starts, const std::optional<Tensor> &continued,
                            Place place, int64_t tokens) {
  expect("slots", slots, place, ScalarType::Int, {starts ? -1 : tokens}, Layout::strided);
  const int64_t count = slots.size(0);
  if (starts) expect("starts", *starts, place, ScalarType::Int, {count + 1});
  if (continued) expect("continued", *continued, place, ScalarType::Bool, {count});
  return {static_cast<const int32_t *>(slots.data_ptr()), slots.stride(0),
          starts ? static_cast<const int32_t *>(starts->data_ptr()) : nullptr,
          continued ? static_cast<const bool *>(continued->data_ptr()) : nullptr, count};
}

// Only on the CPU. On a GPU, reading the contents would wait for the device.
inline void expect_slots(const Requests &requests, int64_t below) {
  for (int64_t r = 0; r < requests.count; ++r) {
    const int32_t slot = requests.slots[r * requests.slot_stride];
    STD_TORCH_CHECK(slot < below, "slots: expected below ", below, ", got ", slot, " at [", r, "]");
  }
}

// Expects contiguous rows, or slots, at any stride, and returns the stride.
inline int64_t expect_rows(const char *name, const Tensor &tensor, Place place, ScalarType dtype,
                           const std::vector<int64_t> &shape) {
  expect(name, tensor, place, dtype, shape, Layout::strided);
  int64_t within = 1;
  bool fits = true;
  for (int64_t d = tensor.dim() - 1; d > 0; --d) {
    fits = fits && (tensor.stride(d) == within || tensor.size(d) == 1);
    within *= tensor.size(d);
  }
  STD_TORCH_CHECK(fits, name, ": expected contiguous rows, got ", describe(tensor));
  return tensor.stride(0);
}

template <class Number>
Conv1d<Number> conv_of(const Tensor &x, const Tensor &weight, Tensor &state, Place place, ScalarType dtype) {
  Conv1d<Number> conv{};
  conv.x_stride = expect_rows("x", x, place, dtype, {-1, -1});
  conv.channels = x.size(1);
  expect("weight", weight, place, dtype, {conv.channels, kConvTaps});
  conv.state_stride = expect_rows("state", state, place, dtype, {-1, kConvTaps - 1, conv.channels});
  conv.x = static_cast<const Number *>(x.data_ptr());
  conv.weight = static_cast<const Number *>(weight.data_ptr());
  conv.state = static_cast<Number *>(state.data_ptr());
  return conv;
}

template <class Number>
DeltaRule<Number> rule_of(const Tensor &qkv, const Tensor &a, const Tensor &b, const Tensor &a_log, const Tensor &dt_bias,
                          Tensor &state, int64_t key_heads, Tensor &out, Place place, ScalarType dtype) {
  DeltaRule<Number> rule{};
  rule.state_stride = expect_rows("state", state, place, ScalarType::Float, {-1, -1, -1, -1});
  const int64_t heads = state.size(1), dim = state.size(3);
  STD_TORCH_CHECK(state.size(2) == dim, "state: expected V = K, got V = ", state.size(2), ", K = ", dim);
  expect_at_least("key_heads", key_heads, 1);
  expect_multiple("state", "value heads", heads, key_heads);
  rule.qkv_stride = expect_rows("qkv", qkv, place, dtype, {-1, (2 * key_heads + heads) * dim});
  const int64_t tokens = qkv.size(0);
  rule.a_stride = expect_rows("a", a, place, dtype, {tokens, heads});
  rule.b_stride = expect_rows("b", b, place, dtype, {tokens, heads});
  expect("a_log", a_log, place, ScalarType::Float, {heads});
  expect("dt_bias", dt_bias, place, ScalarType::Float, {heads});
  expect("out", out, place, dtype, {tokens, heads, dim});
  rule.qkv = static_cast<const Number *>(qkv.data_ptr());
  rule.a = static_cast<const Number *>(a.data_ptr());
  rule.b = static_cast<const Number *>(b.data_ptr());
  rule.a_log = static_cast<const float *>(a_log.data_ptr());
  rule.dt_bias = static_cast<const float *>(dt_bias.data_ptr());
  rule.state = static_cast<float *>(state.data_ptr());
  rule.out = static_cast<Number *>(out.data_ptr());
  rule.key_heads = static_cast<int>(key_heads);
  rule.value_heads = static_cast<int>(heads);
  rule.dim = static_cast<int>(dim);
  return rule;
}

}  // namespace voltserve
