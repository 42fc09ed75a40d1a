// torch.ops.voltserve.silu_and_mul on CUDA tensors: fp16. It can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <vector>

#include "cuda/common/binding.h"
#include "cuda/silu/launch.h"

namespace {

using namespace voltserve;

Tensor silu_and_mul(Tensor x) {
  const Call call("x", x);
  std::vector<int64_t> shape = shape_of(x);
  expect("x", x, call.place, ScalarType::Half, shape);
  STD_TORCH_CHECK(!shape.empty() && shape.back() % 16 == 0, "x: expected [..., 2 n] with n a multiple of 8, got ", describe(x));
  const int64_t n = shape.back() /= 2;
  Tensor y = empty(call, x, shape);
  const int64_t m = n ? y.numel() / n : 0;
  STD_TORCH_CHECK(y.numel() <= std::numeric_limits<int>::max(), "x: expected at most 2^31 results, got ", y.numel());
  expect_aligned("x", x);
  if (m == 0) return y;
  const SiluArgs args{data<const __half>(x), data<__half>(y), static_cast<int>(m), static_cast<int>(n)};
  check(launch_silu_and_mul(args, call.stream), "silu_and_mul");
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) { m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul)); }
