// The two ops of a Gated DeltaNet layer (contracts/gdn.h), for one token per request (decoding) and for any number (prefill).
//
//   delta_decode   a warp holds 8 rows of S in registers, D columns over D / 4 lanes with 16 bytes each. S is read and written once,
//                  8 D^2 bytes per head and request, which is the bound.
//   delta_scan     a block holds 32 rows of S in registers for all tokens of a request, a lane 2 rows by D / 8 columns. Shared memory
//                  stages q and k (normalized), v and gates of 16 tokens, while those of the next 16 are on their way.
//   conv1d         a thread has two neighbouring channels of a segment of the step's tokens.
//
// Everything is fp32 on CUDA cores. Per token and head the rule costs 4 D^2 fused multiply-adds (65,536 at D = 128), in whatever order.
// The chunked form (WY representation, arXiv 2406.06484) would turn most of them into GEMMs for mma.m8n8k4. But it needs fp16
// operands, so the state would be rounded to fp16 once per chunk. For a prompt of 2048 tokens the scans of the 27B at TP=2 take 8 %
// of its linear layers' time, computed for a V100 (docs/results/v100-27b-computed-2026-11-30.json). Exactness is worth more.
//
// Alignment, checked by ops.cpp: x, qkv, y and the convolution's state 4 bytes per row, S 16 bytes per slot.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "contracts/gdn.h"

namespace voltserve {

constexpr int kConvThreads = 128;
constexpr int kConvSegment = 32;  // tokens, where requests may have several

constexpr int kDecodeWarps = 4;
constexpr int kDecodeRows = 8;  // of S that a lane has a part of

constexpr int kScanThreads = 128;
constexpr int kScanTokens = 16;  // staged at a time
constexpr int kScanLanes = 8;    // lanes that share a row
constexpr int kScanRows = 2;     // rows that a lane has a part of
constexpr int kScanBlockRows = kScanThreads / kScanLanes * kScanRows;

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float decay_of(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  return expf(-expf(a_log) * (x > 20.0f ? x : log1pf(expf(x))));
}

template <int LANES>
__device__ inline float sum_over(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

__device__ inline float dot(const float4 &a, const float4 &b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

__device__ inline float4 wide(const uint2 &halves) {
  const float2 low = __half22float2(*reinterpret_cast<const half2 *>(&halves.x));
  const float2 high = __half22float2(*reinterpret_cast<const half2 *>(&halves.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

__device__ inline float4 scaled(const float4 &a, float factor) {
  return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor);
}

// s <- decay s + change k
__device__ inline void update(float4 &s, float decay, float change, const float4 &k) {
  s.x = fmaf(change, k.x, decay * s.x);
  s.y = fmaf(change, k.y, decay * s.y);
  s.z = fmaf(change, k.z, decay * s.z);
  s.w = fmaf(change, k.w, decay * s.w);
}

__device__ inline int64_t slot_of(const Requests &requests, int r) { return requests.slots[r * requests.slot_stride]; }

// The last request that starts at or before token t. It owns t, unless t is past the end of all requests.
__device__ inline int request_of(const Requests &requests, int t) {
  int low = 0, high = static_cast<int>(requests.count) - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (requests.starts[middle] <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Channels 2 c and 2 c + 1 of one request: cached inputs, and the sliding window over the request's tokens.
struct ConvChannels {
  float2 tap[kConvTaps], past[kConvTaps];

  __device__ explicit ConvChannels(const uint4 &taps) {  // the four taps of two channels
    const float4 first = wide(make_uint2(taps.x, taps.y)), second = wide(make_uint2(taps.z, taps.w));
    tap[0] = make_float2(first.x, second.x);
    tap[1] = make_float2(first.y, second.y);
    tap[2] = make_float2(first.z, second.z);
    tap[3] = make_float2(first.w, second.w);
  }
  __device__ half2 push(float2 x) {
    past[kConvTaps - 1] = x;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int j = 0; j < kConvTaps; ++j) {
      sum.x = fmaf(tap[j].x, past[j].x, sum.x);
      sum.y = fmaf(tap[j].y, past[j].y, sum.y);
    }
#pragma unroll
    for (int j = 0; j + 1 < kConvTaps; ++j) past[j] = past[j + 1];
    return __floats2half2_rn(silu(sum.x), silu(sum.y));
  }
};

// Grid: (pairs of channels / kConvThreads, segments of `segment` tokens). A request's first three tokens belong to the segment of its
// first one. Only they read the cache, which the same thread then overwrites.
__global__ void __launch_bounds__(kConvThreads) conv1d_kernel(Conv1d<half> conv, Requests requests, int tokens, int segment) {
  const int pair = blockIdx.x * kConvThreads + threadIdx.x;
  if (2 * pair >= conv.channels) return;
  const int begin = blockIdx.y * segment, end = min(begin + segment, tokens);
  const half2 *x = reinterpret_cast<const half2 *>(conv.x) + pair;
  half2 *y = reinterpret_cast<half2 *>(conv.y) + pair;
  const int64_t x_stride = conv.x_stride / 2, y_stride = conv.channels / 2;
  ConvChannels channels(reinterpret_cast<const uint4 *>(conv.weight)[pair]);

  int r = requests.starts ? request_of(requests, begin) : begin;
  for (int t = begin; t < end; ++r) {
    if (r >= requests.count) return;  // padding
    const int first = requests.starts ? requests.starts[r] : r, last = requests.starts ? requests.starts[r + 1] : r + 1;
    if (last <= t) continue;
    const int64_t slot = slot_of(requests, r);
    const int stop = min(last, max(end, first >= begin ? first + kConvTaps - 1 : 0));
    if (slot < 0) {
      for (; t < stop; ++t) y[t * y_stride] = __float2half2_rn(0);
      continue;
    }
    half2 *state = reinterpret_cast<half2 *>(conv.state + slot * conv.state_stride) + pair;
    if (t == first) {
      const bool continued = !requests.continued || requests.continued[r];
      half2 kept[kConvTaps - 1];
#pragma unroll
      for (int j = 0; j < kConvTaps - 1; ++j) {
        kept[j] = continued ? state[j * y_stride] : __float2half2_rn(0);
        channels.past[j] = __half22float2(kept[j]);
      }
#pragma unroll
      for (int j = 0; j < kConvTaps - 1; ++j) {  // the last three inputs after the step
        const int source = last - (kConvTaps - 1) + j;
        const half2 shifted =
            last - first == 1 ? kept[min(j + 1, kConvTaps - 2)] : kept[kConvTaps - 2];  // by one position, or by two
        state[j * y_stride] = source >= first ? x[source * x_stride] : shifted;
      }
    } else {
      t = max(t, min(first + kConvTaps - 1, last));
      if (t >= stop) continue;
#pragma unroll
      for (int j = 0; j < kConvTaps - 1; ++j) channels.past[j] = __half22float2(x[(t - (kConvTaps - 1) + j) * x_stride]);
    }
    for (; t < stop; ++t) y[t * y_stride] = channels.push(__half22float2(x[t * x_stride]));
  }
}

// Grid: (requests x value heads, D / (rows per block)), one token per request.
template <int D>
__global__ void __launch_bounds__(32 * kDecodeWarps) delta_decode_kernel(DeltaRule<half> rule, Requests requests) {
  constexpr int kLanes = D / 4, kTogether = 32 / kLanes;  // lanes per row; rows of a warp at once
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % kLanes;
  const int r = blockIdx.x / rule.value_heads, head = blockIdx.x % rule.value_heads;
  const int key_head = head * rule.key_heads / rule.value_heads;
  const int row = (blockIdx.y * kDecodeWarps + warp) * kDecodeRows * kTogether + lane / kLanes;
  half *out = rule.out + (static_cast<int64_t>(r) * rule.value_heads + head) * D;
  const int64_t slot = slot_of(requests, r);
  if (row >= D) return;  // whole warps leave
  if (slot < 0) {
#pragma unroll
    for (int i = 0; i < kDecodeRows; ++i) {
      if (column == 0) out[row + i * kTogether] = __float2half(0);
    }
    return;
  }
  float4 *state = reinterpret_cast<float4 *>(rule.state + slot * rule.state_stride + static_cast<int64_t>(head) * D * D) +
                  row * kLanes + column;
  float4 s[kDecodeRows];
#pragma unroll
  for (int i = 0; i < kDecodeRows; ++i) s[i] = state[i * kTogether * kLanes];

  const half *qkv = rule.qkv + r * rule.qkv_stride;
  float4 q = wide(reinterpret_cast<const uint2 *>(qkv + key_head * D)[column]);
  float4 k = wide(reinterpret_cast<const uint2 *>(qkv + (rule.key_heads + key_head) * D)[column]);
  const half *v = qkv + (2 * rule.key_heads + head) * D + row;
  q = scaled(q, rsqrtf(sum_over<kLanes>(dot(q, q)) + 1e-6f) * rsqrtf(static_cast<float>(D)));
  k = scaled(k, rsqrtf(sum_over<kLanes>(dot(k, k)) + 1e-6f));
  const float decay = decay_of(__half2float(rule.a[r * rule.a_stride + head]), rule.a_log[head], rule.dt_bias[head]);
  const float beta = sigmoid(__half2float(rule.b[r * rule.b_stride + head]));

#pragma unroll
  for (int i = 0; i < kDecodeRows; ++i) {
    const float recalled = sum_over<kLanes>(dot(s[i], k));
    update(s[i], decay, beta * (__half2float(v[i * kTogether]) - decay * recalled), k);
    state[i * kTogether * kLanes] = s[i];
    const float sum = sum_over<kLanes>(dot(s[i], q));
    if (column == 0) out[i * kTogether + row] = __float2half(sum);
  }
}

// A block's part of kScanTokens tokens in shared memory.
template <int D>
struct ScanTile {
  float q[kScanTokens][D], k[kScanTokens][D];
  float v[kScanTokens][kScanBlockRows];
  half out[kScanTokens][kScanBlockRows];
  float decay[kScanTokens], beta[kScanTokens];
};

// Loads on their way from global memory, in registers: q and k per warp's tokens, parts of v per thread, a gate in some threads.
template <int D>
struct ScanLoad {
  static constexpr int kWarps = kScanThreads / 32, kLanes = D / 4, kTogether = 32 / kLanes;
  static constexpr int kVectors = 2 * kScanTokens / kWarps / kTogether;  // q and k of each token
  static constexpr int kValues = kScanTokens * kScanBlockRows / kScanThreads;
  uint2 vectors[kVectors];
  half values[kValues], gate;

  // A lane's i-th vector, which is q or k of a token; even ones are q.
  __device__ static int vector_of(int i) { return (i * kWarps + threadIdx.x / 32) * kTogether + threadIdx.x % 32 / kLanes; }

  __device__ void fetch(const DeltaRule<half> &rule, int head, int first_row, int begin, int end) {
    const int key_head = head * rule.key_heads / rule.value_heads, column = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = vector_of(i), t = begin + vector / 2;
      const half *from = rule.qkv + t * rule.qkv_stride + (vector % 2 * rule.key_heads + key_head) * D;
      vectors[i] = t < end ? reinterpret_cast<const uint2 *>(from)[column] : make_uint2(0, 0);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int index = i * kScanThreads + threadIdx.x, t = begin + index / kScanBlockRows;
      const half *from = rule.qkv + t * rule.qkv_stride + (2 * rule.key_heads + head) * D + first_row;
      values[i] = t < end ? from[index % kScanBlockRows] : __float2half(0);
    }
    const int t = begin + threadIdx.x % kScanTokens;
    if (threadIdx.x < 2 * kScanTokens && t < end) {
      gate = threadIdx.x < kScanTokens ? rule.a[t * rule.a_stride + head] : rule.b[t * rule.b_stride + head];
    }
  }

  __device__ void stage(ScanTile<D> &tile, float a_log, float dt_bias) const {
    const int column = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = wide(vectors[i]);
      const int vector = vector_of(i);
      const float scale = vector % 2 ? 1.0f : rsqrtf(static_cast<float>(D));
      float *to = vector % 2 ? tile.k[vector / 2] : tile.q[vector / 2];
      reinterpret_cast<float4 *>(to)[column] = scaled(x, rsqrtf(sum_over<kLanes>(dot(x, x)) + 1e-6f) * scale);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int index = i * kScanThreads + threadIdx.x;
      tile.v[index / kScanBlockRows][index % kScanBlockRows] = __half2float(values[i]);
    }
    if (threadIdx.x < kScanTokens) {
      tile.decay[threadIdx.x] = decay_of(__half2float(gate), a_log, dt_bias);
    } else if (threadIdx.x < 2 * kScanTokens) {
      tile.beta[threadIdx.x - kScanTokens] = sigmoid(__half2float(gate));
    }
  }
};

// Grid: (requests x value heads, D / kScanBlockRows).
template <int D>
__global__ void __launch_bounds__(kScanThreads) delta_scan_kernel(DeltaRule<half> rule, Requests requests) {
  constexpr int kParts = D / (4 * kScanLanes);  // parts of a lane, 4 columns each: float4 number lane + kScanLanes * i of the row
  __shared__ ScanTile<D> tile;
  const int r = blockIdx.x / rule.value_heads, head = blockIdx.x % rule.value_heads, first_row = blockIdx.y * kScanBlockRows;
  const int begin = requests.starts ? requests.starts[r] : r, end = requests.starts ? requests.starts[r + 1] : r + 1;
  if (begin == end) return;
  const int lane = threadIdx.x % kScanLanes, row = threadIdx.x / kScanLanes * kScanRows;
  const int64_t out_stride = static_cast<int64_t>(rule.value_heads) * D;
  half *out = rule.out + head * D + first_row;
  const int64_t slot = slot_of(requests, r);
  if (slot < 0) {
    for (int i = threadIdx.x; i < (end - begin) * kScanBlockRows; i += kScanThreads) {
      out[(begin + i / kScanBlockRows) * out_stride + i % kScanBlockRows] = __float2half(0);
    }
    return;
  }
  float4 *state = reinterpret_cast<float4 *>(rule.state + slot * rule.state_stride + static_cast<int64_t>(head) * D * D) +
                  (first_row + row) * (D / 4) + lane;
  const bool continued = !requests.continued || requests.continued[r];
  float4 s[kScanRows][kParts];
#pragma unroll
  for (int i = 0; i < kScanRows; ++i) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      s[i][p] = continued ? state[i * (D / 4) + p * kScanLanes] : make_float4(0, 0, 0, 0);
    }
  }

  const float a_log = rule.a_log[head], dt_bias = rule.dt_bias[head];
  ScanLoad<D> next;
  next.fetch(rule, head, first_row, begin, end);
  for (int from = begin; from < end; from += kScanTokens) {
    next.stage(tile, a_log, dt_bias);
    __syncthreads();
    if (from + kScanTokens < end) next.fetch(rule, head, first_row, from + kScanTokens, end);
    const int count = min(kScanTokens, end - from);
    for (int t = 0; t < count; ++t) {
      float4 k[kParts], q[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        k[p] = reinterpret_cast<const float4 *>(tile.k[t])[lane + p * kScanLanes];
        q[p] = reinterpret_cast<const float4 *>(tile.q[t])[lane + p * kScanLanes];
      }
      const float decay = tile.decay[t], beta = tile.beta[t];
      float recalled[kScanRows] = {}, sum[kScanRows] = {};
#pragma unroll
      for (int i = 0; i < kScanRows; ++i) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) recalled[i] += dot(s[i][p], k[p]);
      }
#pragma unroll
      for (int i = 0; i < kScanRows; ++i) {
        const float change = beta * (tile.v[t][row + i] - decay * sum_over<kScanLanes>(recalled[i]));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          update(s[i][p], decay, change, k[p]);
          sum[i] += dot(s[i][p], q[p]);
        }
      }
#pragma unroll
      for (int i = 0; i < kScanRows; ++i) {
        const float value = sum_over<kScanLanes>(sum[i]);
        if (lane == i) tile.out[t][row + i] = __float2half(value);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * kScanBlockRows; i += kScanThreads) {
      out[(from + i / kScanBlockRows) * out_stride + i % kScanBlockRows] = tile.out[i / kScanBlockRows][i % kScanBlockRows];
    }
  }
#pragma unroll
  for (int i = 0; i < kScanRows; ++i) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) state[i * (D / 4) + p * kScanLanes] = s[i][p];
  }
}

}  // namespace voltserve
