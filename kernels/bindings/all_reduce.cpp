// The schemas of the all-reduce ops (contracts/all_reduce.h), known on every device; what runs them is in cuda/all_reduce/ops.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cuda/all_reduce/plan.h"

namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t> layout() {
  return {voltserve::kSlotBytes, voltserve::kReduceEpochs, voltserve::kMaxReduceData, voltserve::kReduceBlocks};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def("all_reduce(Tensor x, int[] to, int[] from_, Tensor(a!) epochs, int rank, float limit, Tensor(b!)? late=None) -> Tensor");
  m.def(
      "all_reduce_rms_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, int[] to, int[] from_, Tensor(b!)? epochs, "
      "int "
      "rank, float limit, Tensor(c!)? late=None) -> Tensor");
  m.def("all_reduce_layout() -> (int, int, int, int)");
  m.def("map_host_memory(Tensor epochs, int address, int bytes) -> int");
  m.def("unmap_host_memory(Tensor epochs, int address) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CompositeExplicitAutograd, m) { m.impl("all_reduce_layout", TORCH_BOX(&layout)); }
