#include "cuda/gdn/gdn.cuh"

#include "cuda/gdn/launch.h"

namespace voltserve {
namespace {

template <int D>
cudaError_t launch(const DeltaRule<half> &rule, const Requests &requests, cudaStream_t stream) {
  const unsigned pairs = static_cast<unsigned>(requests.count) * rule.value_heads;
  if (requests.starts) {
    delta_scan_kernel<D><<<dim3(pairs, D / kScanBlockRows), kScanThreads, 0, stream>>>(rule, requests);
  } else {
    constexpr int kRows = kDecodeWarps * kDecodeRows * (32 / (D / 4));  // of a block
    delta_decode_kernel<D><<<dim3(pairs, (D + kRows - 1) / kRows), 32 * kDecodeWarps, 0, stream>>>(rule, requests);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_causal_conv1d(const Conv1d<half> &conv, const Requests &requests, int tokens, cudaStream_t stream) {
  if (tokens == 0 || requests.count == 0) return cudaSuccess;
  const int segment = requests.starts ? kConvSegment : 1;
  const int pairs = static_cast<int>(conv.channels / 2);
  const dim3 grid((pairs + kConvThreads - 1) / kConvThreads, (tokens + segment - 1) / segment);
  conv1d_kernel<<<grid, kConvThreads, 0, stream>>>(conv, requests, tokens, segment);
  return cudaGetLastError();
}

cudaError_t launch_gated_delta_rule(const DeltaRule<half> &rule, const Requests &requests, cudaStream_t stream) {
  if (requests.count == 0) return cudaSuccess;
  switch (rule.dim) {
    case 32:
      return launch<32>(rule, requests, stream);
    case 64:
      return launch<64>(rule, requests, stream);
    case 128:
      return launch<128>(rule, requests, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace voltserve
