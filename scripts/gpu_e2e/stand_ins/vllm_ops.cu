// Stands in for four of vLLM's compiled operators, with their names and signatures, on a machine whose torch they do not load into
// (_C.py says why): RMS norms, SwiGLU, rotary embeddings, in float16, sums in float32, rounded where vLLM's are. On torch's stable
// ABI.
#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "../../../kernels/cuda/binding.h"

namespace {

using namespace voltserve;

constexpr int kThreads = 256, kMostThreads = 1024;
constexpr int kChunk = 8, kChunks = 2;  // halves that a thread moves at once; how often, in a row of at most 16,384

struct alignas(16) Chunk {
  __half2 pairs[kChunk / 2];
};

__device__ float block_sum(float value) {
  __shared__ float parts[kMostThreads / 32];
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  return sum;
}

// A block a row of `width`. Rows of x are `heads` to a token, tokens x_token and heads x_head apart; others are contiguous.
// With a residual: residual += x, and x becomes the norm.
__global__ void norm_kernel(__half* out, const __half* x, __half* residual, const __half* weight, float eps, int64_t x_token,
                            int64_t x_head, int heads, int width) {
  const int64_t row = blockIdx.x;
  const __half* from = x + row / heads * x_token + row % heads * x_head;
  Chunk held[kChunks];
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = (c * blockDim.x + threadIdx.x) * kChunk;
    if (i >= width) continue;
    held[c] = *reinterpret_cast<const Chunk*>(from + i);
    if (residual != nullptr) {
      Chunk& added = *reinterpret_cast<Chunk*>(residual + row * width + i);
      for (int p = 0; p < kChunk / 2; ++p) held[c].pairs[p] = __hadd2(held[c].pairs[p], added.pairs[p]);
      added = held[c];
    }
    for (int p = 0; p < kChunk / 2; ++p) {
      const float2 value = __half22float2(held[c].pairs[p]);
      squares += value.x * value.x + value.y * value.y;
    }
  }
  const float scale = rsqrtf(block_sum(squares) / width + eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = (c * blockDim.x + threadIdx.x) * kChunk;
    if (i >= width) continue;
    const Chunk factors = *reinterpret_cast<const Chunk*>(weight + i);
    for (int p = 0; p < kChunk / 2; ++p) {
      const float2 value = __half22float2(held[c].pairs[p]);
      held[c].pairs[p] = __hmul2(__floats2half2_rn(value.x * scale, value.y * scale), factors.pairs[p]);
    }
    *reinterpret_cast<Chunk*>(out + row * width + i) = held[c];
  }
}

__device__ float silu(float x) { return x / (1 + expf(-x)); }

__global__ void silu_kernel(__half* out, const __half* x, int width) {
  const int64_t row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * kChunk;
  if (i >= width) return;
  Chunk gates = *reinterpret_cast<const Chunk*>(x + 2 * row * width + i);
  const Chunk ups = *reinterpret_cast<const Chunk*>(x + (2 * row + 1) * width + i);
  for (int p = 0; p < kChunk / 2; ++p) {
    const float2 gate = __half22float2(gates.pairs[p]);
    gates.pairs[p] = __hmul2(__floats2half2_rn(silu(gate.x), silu(gate.y)), ups.pairs[p]);
  }
  *reinterpret_cast<Chunk*>(out + row * width + i) = gates;
}

// A block a head of a token.
__global__ void rotary_kernel(const int64_t* positions, __half* x, const __half* cos_sin, int64_t x_token, int64_t x_head, int rotated,
                              bool neox) {
  const __half* row = cos_sin + positions[blockIdx.x] * rotated;
  __half* head = x + blockIdx.x * x_token + blockIdx.y * x_head;
  const int half = rotated / 2;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const __half c = row[i], s = row[half + i];
    __half &first = head[neox ? i : 2 * i], &second = head[neox ? half + i : 2 * i + 1];
    const __half a = first, b = second;
    first = __hsub_rn(__hmul_rn(a, c), __hmul_rn(b, s));
    second = __hadd_rn(__hmul_rn(b, c), __hmul_rn(a, s));
  }
}

__half* halves(const Tensor& tensor) { return data<__half>(tensor); }

// One for each chunk of a row, in whole warps.
int threads_for(int64_t width) { return std::min<int64_t>(kMostThreads, (width + 32 * kChunk - 1) / (32 * kChunk) * 32); }

void rms_norm(Tensor out, Tensor x, Tensor weight, double eps) {
  const Call call("x", x);
  const int64_t width = x.size(x.dim() - 1), rows = x.numel() / width;
  const int heads = x.dim() == 3 ? x.size(1) : 1;
  if (rows > 0) {
    norm_kernel<<<rows, threads_for(width), 0, call.stream>>>(halves(out), halves(x), nullptr, halves(weight), eps, x.stride(0),
                                                              x.dim() == 3 ? x.stride(1) : 0, heads, width);
  }
  check(cudaGetLastError(), "rms_norm");
}

void fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  const Call call("x", x);
  const int64_t width = x.size(x.dim() - 1), rows = x.numel() / width;
  if (rows > 0) {
    norm_kernel<<<rows, threads_for(width), 0, call.stream>>>(halves(x), halves(x), halves(residual), halves(weight), eps, width, 0, 1,
                                                              width);
  }
  check(cudaGetLastError(), "fused_add_rms_norm");
}

void silu_and_mul(Tensor out, Tensor x) {
  const Call call("x", x);
  const int64_t width = out.size(out.dim() - 1), rows = out.numel() / width;
  if (rows > 0) {
    silu_kernel<<<dim3(rows, (width + kThreads * kChunk - 1) / (kThreads * kChunk)), kThreads, 0, call.stream>>>(halves(out), halves(x), width);
  }
  check(cudaGetLastError(), "silu_and_mul");
}

void rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin, bool neox) {
  const Call call("query", query);
  const int tokens = positions.numel(), rotated = cos_sin.size(1);
  for (const Tensor* x : {&query, key ? &*key : nullptr}) {
    if (x == nullptr || tokens == 0) continue;
    const int heads = x->numel() / tokens / head_size;
    const int64_t apart = x->dim() == 3 ? x->stride(1) : head_size;
    rotary_kernel<<<dim3(tokens, heads), 32, 0, call.stream>>>(data<const int64_t>(positions), halves(*x), halves(cos_sin), x->stride(0),
                                                                apart, rotated, neox);
  }
  check(cudaGetLastError(), "rotary_embedding");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}
