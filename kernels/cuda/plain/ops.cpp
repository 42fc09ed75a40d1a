// torch.ops.voltserve.{rms_norm_to, add_rms_norm, rotary_embedding} on CUDA tensors: fp16. They allocate nothing, do not wait for the GPU
// and do not read what is on it, so they can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cuda/common/binding.h"
#include "cuda/plain/launch.h"

namespace {

using namespace voltserve;

void expect_width(const char *name, int64_t width) {
  expect_multiple(name, "width", width, 8);
  STD_TORCH_CHECK(width <= kPlainNormWidth, name, ": expected a width of at most ", kPlainNormWidth, ", got ", width);
}

// y = norm(x) weight: x [T, H] or [T, heads, D], its last dimension dense; y dense, of x's shape.
void rms_norm_to(Tensor y, Tensor x, Tensor weight, double eps) {
  const Call call("x", x);
  STD_TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "x: expected [T, H] or [T, heads, D], got ", describe(x));
  const int64_t width = x.size(x.dim() - 1), heads = x.dim() == 3 ? x.size(1) : 1;
  expect("x", x, call.place, ScalarType::Half, shape_of(x), Layout::strided);
  expect("y", y, call.place, ScalarType::Half, shape_of(x));
  expect("weight", weight, call.place, ScalarType::Half, {width});
  expect_width("x", width);
  const int64_t token = x.stride(0), head = x.dim() == 3 ? x.stride(1) : 0;
  STD_TORCH_CHECK(x.stride(x.dim() - 1) == 1 && token % 8 == 0 && head % 8 == 0,
                  "x: expected dense rows on 16-byte boundaries, got ", describe(x));
  for (const Tensor *tensor : {&x, &y, &weight}) expect_aligned("x, y, weight", *tensor);
  if (x.numel() == 0) return;
  const PlainNormArgs args{data<const __half>(x),   data<const __half>(weight), nullptr, data<__half>(y),
                           static_cast<float>(eps), x.size(0) * heads,          token,   head,
                           static_cast<int>(heads), static_cast<int>(width)};
  check(launch_plain_norm(args, call.stream), "rms_norm_to");
}

// residual += x; x = norm(residual) weight: [..., H], dense.
void add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  const Call call("x", x);
  STD_TORCH_CHECK(x.dim() > 0, "x: expected [..., H], got ", describe(x));
  const int64_t width = x.size(x.dim() - 1);
  expect("x", x, call.place, ScalarType::Half, shape_of(x));
  expect("residual", residual, call.place, ScalarType::Half, shape_of(x));
  expect("weight", weight, call.place, ScalarType::Half, {width});
  expect_width("x", width);
  for (const Tensor *tensor : {&x, &residual, &weight}) expect_aligned("x, residual, weight", *tensor);
  if (x.numel() == 0) return;
  const PlainNormArgs args{data<const __half>(x),
                           data<const __half>(weight),
                           data<__half>(residual),
                           data<__half>(x),
                           static_cast<float>(eps),
                           x.numel() / width,
                           width,
                           0,
                           1,
                           static_cast<int>(width)};
  check(launch_plain_norm(args, call.stream), "add_rms_norm");
}

// Rotates query and key, [T, heads D] or [T, heads, D], in place.
void rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin, bool halves) {
  const Call call("query", query);
  const int64_t tokens = positions.numel();
  expect("positions", positions, call.place, ScalarType::Long, shape_of(positions));
  expect("cos_sin", cos_sin, call.place, ScalarType::Half, {-1, -1});
  STD_TORCH_CHECK(cos_sin.size(1) <= head_size && cos_sin.size(1) % 2 == 0,
                  "cos_sin: expected an even width of at most the head size ", head_size, ", got ", cos_sin.size(1));
  for (const Tensor *x : {&query, key ? &*key : nullptr}) {
    if (x == nullptr || tokens == 0) continue;
    STD_TORCH_CHECK((x->dim() == 2 || x->dim() == 3) && x->size(0) == tokens && x->stride(x->dim() - 1) == 1,
                    "query, key: expected [T, heads D] or [T, heads, D] of ", tokens, " tokens with a dense last dimension, got ",
                    describe(*x));
    expect("query, key", *x, call.place, ScalarType::Half, shape_of(*x), Layout::strided);
    const int64_t heads = x->numel() / tokens / head_size;
    expect_multiple("query, key", "row", x->numel() / tokens, head_size);
    const PlainRotaryArgs args{data<const int64_t>(positions),
                               data<const __half>(cos_sin),
                               data<__half>(*x),
                               tokens,
                               x->stride(0),
                               x->dim() == 3 ? x->stride(1) : head_size,
                               static_cast<int>(heads),
                               static_cast<int>(cos_sin.size(1)),
                               halves};
    check(launch_plain_rotary(args, call.stream), "rotary_embedding");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("rms_norm_to", TORCH_BOX(&rms_norm_to));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}
