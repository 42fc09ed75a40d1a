// Attention over a paged fp16 cache, for requests of more than 8 new tokens: prefill, whole or in chunks, on Volta's tensor cores.
//
//     out[t][h] = softmax(scale * q[t][h] K^T) V
//
// Numerics: scores, the online softmax (as in decode.cuh) and sums are fp32. The softmax's weights are rounded to fp16 for their
// product with V, whose values are fp16 too.
//
// Split of work. Rows are pairs of new token and query head. Those of one key head lie side by side, so K and V are read once for
// all of them. A block takes 16 rows per warp and walks the positions that they see, in tiles:
//
//     shared memory   | Q: rows | one tile: K, then V | weights |
//     registers       the next tile (V while K is multiplied, the next K while V is), on its way from memory
//
// Each barrier separates two uses of the tile's memory: all warps have multiplied K before V replaces it, and the other way round.
//
// mma.m8n8k4 (HMMA.884): a warp's four quad-pairs share 16 rows (operand A) and differ in the columns (operand B): 32 positions of K
// at a time, then 32 dimensions of V. K is operand B by columns and V by rows, so both lie in shared memory as they do in the cache.
// Fragments: PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type".
//
// At head_dim 128 a warp multiplies 16 rows by 64 positions with 256 mma.m8n8k4. They take 2048 clocks of its tensor cores, and 112
// operands of 128 bits from shared memory. Computed for a V100 PCIe from the machine code (perfmodel/attention_model.py): 70
// TFLOP/s, and 77 at head_dim 256. The model has no latencies, so these are upper bounds
// (docs/results/cuda-attention-v100-pcie-predicted-2026-11-30.json).
#pragma once

#include "cuda/attention/pages.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/plan.h"

namespace voltserve {

// Copies one tile of K or V from memory to registers (fetch), and later to shared memory (store). A thread copies one chunk of 8
// dimensions of every kStep-th position.
template <int HEAD_DIM>
struct TileLoader {
  static constexpr PrefillShape kShape = prefill_shape(HEAD_DIM);
  static constexpr int kChunks = HEAD_DIM / 8, kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // per position
  static constexpr int kStep = 32 * kShape.warps / kLanes, kHeld = kShape.tokens / kStep;
  static constexpr int kEights = kShape.tokens / 8;
  static_assert(kStep % 8 == 0 && kHeld * kStep == kShape.tokens && kEights <= 32);

  const Pages &pages;
  int chunk, row;  // of the thread
  int start;       // in lane i < kEights: the offset of the tile's i-th group of 8 positions
  uint4 held[kHeld];

  __device__ explicit TileLoader(const Pages &p) : pages(p), chunk(threadIdx.x % kLanes), row(threadIdx.x / kLanes) {}
  // Positions from `end` on are not read; the last ones before stand in for them.
  __device__ int last_eight(int end) const { return (end - 1) & ~7; }
  __device__ void locate(int position, int end) {
    start = pages.chunk(min(position + 8 * static_cast<int>(threadIdx.x % kEights), last_eight(end)));
  }
  __device__ void fetch(const __half *cache, int position, int end) {
    const uint4 *const from = reinterpret_cast<const uint4 *>(cache) + chunk;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int eight = (i * kStep + row) / 8;  // the same for the whole warp
      const int first = min(position + 8 * eight, last_eight(end));
      const int at = __shfl_sync(~0u, start, eight) + min(row % 8, end - 1 - first) * pages.token_chunks;
      if (kLanes == kChunks || chunk < kChunks) held[i] = __ldg(from + at);
    }
  }
  __device__ void store(__half *shared) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      __half *const to = shared + (i * kStep + row) * kShape.stride() + 8 * chunk;
      if (kLanes == kChunks || chunk < kChunks) *reinterpret_cast<uint4 *>(to) = held[i];
    }
  }
};

// The tiles of rows that this kernel computes for a request.
template <int HEAD_DIM>
__device__ int prefill_tiles(const AttentionArgs &args, int request) {
  const Query query(args, request);
  const int heads = args.q_heads / args.kv_heads;
  return query.count > kDecodeTokens ? ceil_div(query.count * heads, prefill_shape(HEAD_DIM).rows()) : 0;
}

// Grid: tiles of rows (AttentionPlan::prefill_tiles), key heads.
template <int HEAD_DIM>
__global__ void __launch_bounds__(32 * prefill_shape(HEAD_DIM).warps, prefill_shape(HEAD_DIM).blocks_per_processor)
    attention_prefill_kernel(const AttentionArgs args) {
  constexpr PrefillShape kShape = prefill_shape(HEAD_DIM);
  constexpr int kStride = kShape.stride(), kWeightStride = kShape.tokens + 8;
  constexpr int kColumns = kShape.tokens / 32, kGroups = kShape.groups();
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  half *const shared_q = reinterpret_cast<half *>(shared_bytes);
  half *const shared_kv = shared_q + kShape.rows() * kStride;
  half *const shared_weights = shared_kv + kShape.tokens * kStride;

  int first_tile;
  const int request = find_request(args.requests, blockIdx.x, first_tile, [&](int b) { return prefill_tiles<HEAD_DIM>(args, b); });
  if (request < 0) return;
  const Query query(args, request);
  const int heads = args.q_heads / args.kv_heads, kv_head = blockIdx.y, rows = query.count * heads;
  // The last rows see the most positions, so their blocks start first.
  const int tile = prefill_tiles<HEAD_DIM>(args, request) - 1 - (static_cast<int>(blockIdx.x) - first_tile);
  const int first_row = tile * kShape.rows();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 16 / 4;

  // The offset of row r of q, or of out, in elements.
  auto element = [&](int r, int stride) {
    return static_cast<size_t>(query.first + r / heads) * stride + (kv_head * heads + r % heads) * HEAD_DIM;
  };
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kShape.rows() * kChunks; i += 32 * kShape.warps) {
    const int r = i / kChunks, chunk = i % kChunks;
    uint4 halves = make_uint4(0, 0, 0, 0);
    if (first_row + r < rows) halves = *reinterpret_cast<const uint4 *>(args.q + element(first_row + r, args.q_stride) + 8 * chunk);
    *reinterpret_cast<uint4 *>(shared_q + r * kStride + 8 * chunk) = halves;
  }
  if constexpr (64 * kGroups > HEAD_DIM) {
    // Padding dimensions are multiplied like the others, so they must be zero.
    for (int i = threadIdx.x; i < kShape.tokens * (kStride - HEAD_DIM); i += 32 * kShape.warps) {
      shared_kv[i / (kStride - HEAD_DIM) * kStride + HEAD_DIM + i % (kStride - HEAD_DIM)] = __float2half(0);
    }
  }

  // The positions that the block's rows see, from a group of 8 on. A lane's rows are 8a + (lane & 1) + 2j + 4 (lane >= 16).
  const int begin = query.begin(first_row / heads, args.window) & ~7;
  const int end = query.end((min(first_row + kShape.rows(), rows) - 1) / heads);
  const int lane_row = first_row + 16 * warp + (lane & 1) + lane / 16 * 4;
  auto token_of = [&](int a, int j) { return min(lane_row + 8 * a + 2 * j, rows - 1) / heads; };
  const int warp_last = min(first_row + 16 * warp + 15, rows - 1) / heads,
            warp_first = min(first_row + 16 * warp, rows - 1) / heads;
  const int all_see_begin = query.begin(warp_last, args.window), all_see_end = query.end(warp_first);

  const float factor = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * kLog2e;
  const half *const q_operand = shared_q + (16 * warp + lane % 4 + lane / 16 * 4) * kStride;
  half *const weights = shared_weights + 16 * warp * kWeightStride;
  half *const weights_written = weights + ((lane & 1) + lane / 16 * 4) * kWeightStride + 4 * quad + (lane & 2);
  const half *const weights_operand = weights + (lane % 4 + lane / 16 * 4) * kWeightStride;
  // Chunks of 8 dimensions are assigned to the quad-pairs so that 8 neighbouring lanes read different banks.
  auto value_chunk = [&](int upper) { return (quad & 1) * 4 + quad / 2 + 2 * upper; };
  const half *const value_operand = shared_kv + lane % 4 * kStride + 8 * value_chunk(lane / 16);

  float sum[2][kGroups][2][8] = {};
  float maximum[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, total[2][2] = {};

  const Pages pages(args, request, kv_head);
  TileLoader<HEAD_DIM> loader(pages);
  loader.locate(begin, end);
  loader.fetch(args.k_cache, begin, end);
#pragma unroll 1
  for (int position = begin; position < end; position += kShape.tokens) {
    __syncthreads();  // all warps have multiplied V
    loader.store(shared_kv);
    __syncthreads();
    loader.fetch(args.v_cache, position, end);

    float score[2][kColumns][8] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 8) {
      uint4 a[2], b[kColumns];
#pragma unroll
      for (int i = 0; i < 2; ++i) a[i] = *reinterpret_cast<const uint4 *>(q_operand + 8 * i * kStride + k);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) b[c] = *reinterpret_cast<const uint4 *>(shared_kv + (32 * c + lane) * kStride + k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          multiply_884<false>(score[i][c], a[i].x, a[i].y, b[c].x, b[c].y);
          multiply_884<false>(score[i][c], a[i].z, a[i].w, b[c].z, b[c].w);
        }
      }
    }

    // Score e of column block c belongs to the lane's row j = e / 2 % 2 and to position 32c + 4 quad + (lane & 2) + e % 2 + 16 (e / 4).
    const bool masked = position < all_see_begin || position + kShape.tokens > all_see_end;
    bool corrects = false;
    float correction[2][2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) score[a][c][e] *= factor;
      }
      if (args.soft_cap > 0) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int e = 0; e < 8; ++e) score[a][c][e] = capped(score[a][c][e], args.soft_cap * kLog2e);
        }
      }
      if (masked) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int token = token_of(a, j), see_begin = query.begin(token, args.window), see_end = query.end(token);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int e = 2 * j; e < 8; e += (e & 1) ? 3 : 1) {
              const int at = position + 32 * c + 4 * quad + (lane & 2) + e % 2 + 16 * (e / 4);
              if (at < see_begin || at >= see_end) score[a][c][e] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float highest = maximum[a][j];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float (&s)[8] = score[a][c];
          highest = fmaxf(highest, fmaxf(fmaxf(s[2 * j], s[2 * j + 1]), fmaxf(s[2 * j + 4], s[2 * j + 5])));
        }
#pragma unroll
        for (int width = 2; width < 16; width *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, width));
        // The maximum of a row that has seen no position is -infinity; a difference with it would be NaN.
        const float base = highest == -INFINITY ? 0 : highest;
        correction[a][j] = exp2_fast(maximum[a][j] - base);
        corrects |= correction[a][j] != 1;
        maximum[a][j] = highest;
        total[a][j] *= correction[a][j];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const float w0 = exp2_fast(score[a][c][2 * j + 4 * upper] - base);
            const float w1 = exp2_fast(score[a][c][2 * j + 4 * upper + 1] - base);
            total[a][j] += w0 + w1;
            *reinterpret_cast<half2 *>(weights_written + (8 * a + 2 * j) * kWeightStride + 32 * c + 16 * upper) =
                __floats2half2_rn(w0, w1);
          }
        }
      }
    }
    if (__any_sync(~0u, corrects)) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[a][g][h][e] *= correction[a][e / 2 % 2];
          }
        }
      }
    }
    __syncthreads();  // all warps have multiplied K
    loader.store(shared_kv);
    __syncthreads();
    if (position + kShape.tokens < end) {
      loader.locate(position + kShape.tokens, end);
      loader.fetch(args.k_cache, position + kShape.tokens, end);
    }

#pragma unroll
    for (int t = 0; t < kShape.tokens; t += 8) {
      uint4 a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) a[i] = *reinterpret_cast<const uint4 *>(weights_operand + 8 * i * kWeightStride + t);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint4 low = *reinterpret_cast<const uint4 *>(value_operand + t * kStride + 64 * g);
        const uint4 high = *reinterpret_cast<const uint4 *>(value_operand + (t + 4) * kStride + 64 * g);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_884<true>(sum[i][g][0], a[i].x, a[i].y, low.x, low.y);
          multiply_884<true>(sum[i][g][1], a[i].x, a[i].y, low.z, low.w);
          multiply_884<true>(sum[i][g][0], a[i].z, a[i].w, high.x, high.y);
          multiply_884<true>(sum[i][g][1], a[i].z, a[i].w, high.z, high.w);
        }
      }
    }
  }

  // Element e of sum[a][g][h] belongs to the same row as score e, and to dimension 64g + 8 value_chunk(e / 4) + 4h + (lane & 2) + e % 2.
  // Rows are written through the warp's own part of Q, which no other warp reads.
  half *const written = shared_q + (16 * warp + (lane & 1) + lane / 16 * 4) * kStride + (lane & 2);
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int width = 2; width < 16; width *= 2) total[a][j] += __shfl_xor_sync(~0u, total[a][j], width);
      const float whole = __frcp_rn(total[a][j]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const float *const s = sum[a][g][h] + 2 * j + 4 * upper;
            *reinterpret_cast<half2 *>(written + (8 * a + 2 * j) * kStride + 64 * g + 8 * value_chunk(upper) + 4 * h) =
                __floats2half2_rn(s[0] * whole, s[1] * whole);
          }
        }
      }
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = 16 * warp + i / kChunks, chunk = i % kChunks;
    if (first_row + r < rows) {
      *reinterpret_cast<uint4 *>(args.out + element(first_row + r, args.out_stride) + 8 * chunk) =
          *reinterpret_cast<const uint4 *>(shared_q + r * kStride + 8 * chunk);
    }
  }
}

}  // namespace voltserve
