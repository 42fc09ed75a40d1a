// The norm between products on CUDA tensors; the contract is contracts/all_reduce.h. It neither waits for the GPU nor reads what is on
// it, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "cuda/norm/launch.h"
#include "cuda/all_reduce/binding.h"

namespace {

using namespace voltserve;

Tensor all_reduce_rms_norm(Tensor x, std::optional<Tensor> residual, Tensor weight, double eps, std::vector<int64_t> to,
                           std::vector<int64_t> from, std::optional<Tensor> epochs, int64_t rank, double limit,
                           std::optional<Tensor> late) {
  const Call call("x", x);
  expect("weight", weight, call.place, ScalarType::Half, {-1});
  const int64_t hidden = weight.size(0);
  expect_last_dimension("x", x, call.place, hidden);
  const std::vector<int64_t> shape = shape_of(x);
  expect("x", x, call.place, ScalarType::Half, shape);
  expect_aligned("x", x);
  expect_aligned("weight", weight);
  if (residual) {
    expect("residual", *residual, call.place, ScalarType::Half, shape);
    expect_aligned("residual", *residual);
  }
  Tensor y = empty(call, x, shape);
  const int64_t rows = hidden > 0 ? x.numel() / hidden : 0;
  if (rows == 0) return y;

  NormArgs args{};
  NormPlan plan{};
  if (epochs) args.reduce = places(call, to, from, *epochs, rank, limit, late);
  try {
    plan = plan_norm(static_cast<int>(rows), static_cast<int>(hidden), args.reduce.ranks);
  } catch (const std::invalid_argument &error) {
    STD_TORCH_CHECK(false, "x: ", error.what());
  }
  args.reduce.x = x.data_ptr();
  args.reduce.y = y.data_ptr();
  args.residual = residual ? data<__half>(*residual) : nullptr;
  args.weight = data<const __half>(weight);
  args.rows = static_cast<int>(rows);
  args.hidden = static_cast<int>(hidden);
  args.eps = static_cast<float>(eps);
  check(launch_norm(args, plan, call.stream), "all_reduce_rms_norm");
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) { m.impl("all_reduce_rms_norm", TORCH_BOX(&all_reduce_rms_norm)); }
