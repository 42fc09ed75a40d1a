// out[t][h] = softmax(scale q[t][h] K^T) V over a paged fp16 cache, for requests of 1 .. 8 new tokens: the decoding step, and
// speculative tokens checked together, on tensor cores (attention_decode_mma.cuh). Scores, softmax (online, Milakov and Gimelshein,
// arXiv 1805.02867) and sums are fp32; the softmax's weights are rounded to fp16 for their product with V, as the cache's values are.
//
// The G query heads of a key head, times the new tokens, are the *rows*. A block works for up to 64 of them, 8 a warp, so every byte of K
// and V comes from memory once; warps with other rows of the block load it again at about the same time, from L1. A warp walks its
// positions 16 at a time. Keys and values go from memory to the registers that the tensor cores read.
//
// All requests' positions are cut into runs of about equal length (split-KV), as many as the GPU holds blocks, found by each block
// from seq_lens: a batch of one long and many short requests is balanced, and a captured graph stays right. A request with several
// runs leaves sums, bases and totals in `partial`, and blocks that finish last add them in order: the same bits every time.
// Positions past a request's end are never read: a masked weight is 0, but 0 * NaN is not.
//
// Bytes: 4 * head_dim a position and key head. Of its read ceiling an H200 reached 74-81 % with 8 key heads and more, 63-64 % with 2 and 4
// (8 requests of 8192 positions, 2026-11-30, docs/results/cuda-attention-h200-time-2026-11-30.json): 16 us do not depend on the bytes. A
// V100, computed from the machine code: 94-99 %.
#pragma once

#include "attention.cuh"
#include "attention_decode_mma.cuh"
#include "attention_plan.h"
#include "dependent.cuh"

namespace voltserve {

constexpr int kShortestRun = 64;  // positions
constexpr int kRadix = 16;        // runs that are added up at once

// How the batch's positions are cut, the same for every block.
struct Runs {
  const AttentionArgs &args;
  int tile, run_tiles;

  // `units`: AttentionPlan::units, which the runs must not exceed.
  __device__ Runs(const AttentionArgs &a, int tile_, int units) : args(a), tile(tile_) {
    const int total = sum_over(args.requests, [&](int b) { return tiles(b); });
    // The shortest runs that are few enough: blocks finish together if the GPU is full of them. Every request may end a run before it is
    // full, so as many fewer are always enough.
    int low = max(1, ceil_div(total, units)), high = max(low, ceil_div(total, max(1, units - args.requests)));
    while (low < high) {
      run_tiles = (low + high) / 2;
      if (sum_over(args.requests, [&](int b) { return runs(b); }) <= units) {
        high = run_tiles;
      } else {
        low = run_tiles + 1;
      }
    }
    // Shorter runs than kShortestRun positions cost more in adding up than they gain.
    run_tiles = max(low, kShortestRun / tile);
  }
  // The first position that request b's first token sees, down to a group of 8.
  __device__ int begin(const Query &query) const { return query.begin(0, args.window) & ~7; }
  __device__ int tiles(int b) const {
    const Query query(args, b);
    return query.count > 0 && query.count <= kDecodeTokens ? ceil_div(query.length - begin(query), tile) : 0;
  }
  __device__ int runs(int b) const { return ceil_div(tiles(b), run_tiles); }
};

// Weights are 2^(score - base), and base follows a row's maximum only when a weight would pass 2^kMostWeight: then the maximum's becomes
// 2^kUsualWeight. So sums are rarely scaled, and fp16 holds weights down to 2^-(24 + kUsualWeight) of the largest.
constexpr float kMostWeight = 15, kUsualWeight = 7;
constexpr float kUnseen = -1e30f;  // the base of a row that has seen nothing; finite, so that differences are numbers

// HEAD_DIM, ROW_WARPS: decode_shape(). Grid: units, key heads, row blocks.
template <int HEAD_DIM, int ROW_WARPS>
__global__ void __launch_bounds__(decode_shape(HEAD_DIM, ROW_WARPS).threads(), decode_shape(HEAD_DIM, ROW_WARPS).blocks_per_processor)
    attention_decode_kernel(const AttentionArgs args, int partial_rows) {
  constexpr DecodeShape kShape = decode_shape(HEAD_DIM, ROW_WARPS);
  constexpr int kTokenWarps = kShape.token_warps, kStride = HEAD_DIM + 8;  // of sums: 8 more, against bank conflicts
  using Products = DecodeProducts<HEAD_DIM>;
  constexpr int kKeyChunks = Products::kKeyChunks, kGroups = Products::kGroups, kChunks = HEAD_DIM / 8;

  __shared__ float2 ends[ROW_WARPS][kTokenWarps][kWarpRows];  // base and total
  __shared__ __align__(16) float sums[kTokenWarps > 1 ? ROW_WARPS * kTokenWarps * kWarpRows * kStride : 1];

  let_next_start();
  const Runs runs(args, kShape.tile(), gridDim.x);
  int first_unit;
  const int request = find_request(args.requests, blockIdx.x, first_unit, [&](int b) { return runs.runs(b); });
  if (request < 0) return;
  const Query query(args, request);
  const int heads = args.q_heads / args.kv_heads, kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, token_warp = warp % kTokenWarps, row_warp = warp / kTokenWarps;
  const int block_row = blockIdx.z * kShape.rows(), first_row = block_row + kWarpRows * row_warp, rows = query.count * heads;
  if (block_row >= rows) return;

  // This block's run: tiles in equal shares, so that a request's last run is not a stub.
  const int tiles = runs.tiles(request), count = runs.runs(request);
  int run = blockIdx.x - first_unit;
  const int first_tile = run * tiles / count, last_tile = (run + 1) * tiles / count;
  const int begin = runs.begin(query);
  auto position_of = [&](int tile) { return begin + (tile * kTokenWarps + token_warp) * kWarpPositions; };

  Products products(threadIdx.x % 32);
  // Chunks past the head's last are multiplied by 0, and what they sum is not written; chunk 0 stands in for them.
  auto inside = [](int chunk, int last) { return last < kChunks || chunk < kChunks ? chunk : 0; };
  uint4 q[kKeyChunks];
  {
    const int row = first_row + products.query_row(), token = row / heads, head = kv_head * heads + row % heads;
    const __half *const of_head = args.q + static_cast<size_t>(query.first + token) * args.q_stride + head * HEAD_DIM;
    const uint4 *const from = reinterpret_cast<const uint4 *>(of_head);
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      const int chunk = products.key_chunk() + 4 * j;
      q[j] = row < rows && chunk < kChunks ? from[chunk] : make_uint4(0, 0, 0, 0);
    }
  }

  // What each row whose scores this lane has sees, and the positions that all the warp's rows see.
  int see_begin[Products::kHeldRows], see_end[Products::kHeldRows];
  auto token_of = [&](int row) { return min(first_row + row, rows - 1) / heads; };
#pragma unroll
  for (int r = 0; r < Products::kHeldRows; ++r) {
    const int token = token_of(products.score_row(r));
    see_begin[r] = query.begin(token, args.window);
    see_end[r] = query.end(token);
  }
  const int all_see_begin = query.begin(token_of(kWarpRows - 1), args.window), all_see_end = query.end(token_of(0));

  const Pages pages(args, request, kv_head);
  const int last_eight = (query.length - 1) & ~7;
  // Where the tile's two groups of 8 positions are; the request's last stands in for one past its end.
  auto locate = [&](int tile, int (&start)[2]) {
#pragma unroll
    for (int u = 0; u < 2; ++u) start[u] = pages.chunk(min(position_of(tile) + 8 * u, last_eight));
  };
  // Position `number` of the tile's group u, or the request's last one.
  auto chunk_of = [&](int tile, const int (&start)[2], int u, int number) {
    const int first = min(position_of(tile) + 8 * u, last_eight);
    return start[u] + min(number, query.length - 1 - first) * args.token_chunks;
  };
  uint4 k[2][kKeyChunks], v[4][kGroups];
  auto load_keys = [&](int tile, const int (&start)[2]) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 *const from = reinterpret_cast<const uint4 *>(args.k_cache) + chunk_of(tile, start, u, products.key_position());
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) k[u][j] = from[inside(products.key_chunk() + 4 * j, 4 * j + 3)];
    }
  };
  auto load_values = [&](int tile, const int (&start)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 *const from = reinterpret_cast<const uint4 *>(args.v_cache) + chunk_of(tile, start, i / 2, products.value_position(i));
#pragma unroll
      for (int g = 0; g < kGroups; ++g) v[i][g] = from[inside(products.value_chunk() + 8 * g, 8 * g + 7)];
    }
  };

  const float factor = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * kLog2e;
  float base[Products::kHeldRows], total[Products::kHeldRows] = {};
#pragma unroll
  for (int r = 0; r < Products::kHeldRows; ++r) base[r] = kUnseen;
  // At head_dim 256 registers hold either keys or values.
    constexpr bool kBoth = kGroups < 4;
  int start[2];
  locate(first_tile, start);
  load_keys(first_tile, start);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    if (kBoth) {
      load_values(tile, start);
      __syncwarp();  // or the compiler moves the loads past the products, which wait for the keys
    }
    // After the last tile its keys are loaded again, from L1: a branch around the loads would cost as many moves.
    const int next_tile = min(tile + 1, last_tile - 1);
    int next[2];
    locate(next_tile, next);

    float score[Products::kHeldRows][Products::kHeldPositions];
    products.scores(q, k, score);
    if (kBoth) {
      load_keys(next_tile, next);
    } else {
      __syncwarp();  // or the compiler hoists the loads, for which there are no registers
      load_values(tile, start);
    }

    const int position = position_of(tile);
    bool raises = false;
#pragma unroll
    for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
      for (int i = 0; i < Products::kHeldPositions; ++i) score[r][i] *= factor;
    }
    if (args.soft_cap > 0) {
#pragma unroll
      for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
        for (int i = 0; i < Products::kHeldPositions; ++i) score[r][i] = capped(score[r][i], args.soft_cap * kLog2e);
      }
    }
    if (position < all_see_begin || position + kWarpPositions > all_see_end) {
#pragma unroll
      for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
        for (int i = 0; i < Products::kHeldPositions; ++i) {
          const int at = position + products.score_position(i);
          if (at < see_begin[r] || at >= see_end[r]) score[r][i] = -INFINITY;
        }
      }
    }
    float highest[Products::kHeldRows];
#pragma unroll
    for (int r = 0; r < Products::kHeldRows; ++r) {
      highest[r] = score[r][0];
#pragma unroll
      for (int i = 1; i < Products::kHeldPositions; ++i) highest[r] = fmaxf(highest[r], score[r][i]);
      raises |= highest[r] > base[r] + kMostWeight;
    }
    if (__any_sync(~0u, raises)) {
      float correction[Products::kHeldRows];
#pragma unroll
      for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
          if (Products::kRowBits & bit) highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], bit));
        }
        const float raised = highest[r] > base[r] + kMostWeight ? highest[r] - kUsualWeight : base[r];
        correction[r] = exp2_fast(base[r] - raised);
        base[r] = raised;
        total[r] *= correction[r];
      }
      products.scale(correction);
    }
#pragma unroll
    for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
      for (int i = 0; i < Products::kHeldPositions; ++i) {
        score[r][i] = exp2_fast(score[r][i] - base[r]);
        total[r] += score[r][i];
      }
    }
    products.add(score, v);
    if (!kBoth) {
      __syncwarp();
      load_keys(next_tile, next);
    }
    start[0] = next[0];
    start[1] = next[1];
  }

  // The warps of a row meet: each scales its sums to the highest base of all.
#pragma unroll
  for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if (Products::kRowBits & bit) total[r] += __shfl_xor_sync(~0u, total[r], bit);
    }
    if ((products.lane & Products::kRowBits) == 0) ends[row_warp][token_warp][products.score_row(r)] = make_float2(base[r], total[r]);
  }
  __syncthreads();
  // The highest base of a row of row warp `of`, and the sum of its weights.
  auto end_of = [&](int of, int row) {
    float2 end = make_float2(kUnseen, 0);
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) end.x = fmaxf(end.x, ends[of][w][row].x);
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) end.y = fmaf(ends[of][w][row].y, exp2_fast(ends[of][w][row].x - end.x), end.y);
    return end;
  };
  // Where a run's partial results are.
  auto row_of = [&](int unit, int row) { return (static_cast<size_t>(unit) * args.kv_heads + kv_head) * partial_rows + row; };
  float2 *const partial_ends =
      reinterpret_cast<float2 *>(args.partial + static_cast<size_t>(gridDim.x) * args.kv_heads * partial_rows * HEAD_DIM);
  // Two sums of a row over runs of this block: of the whole request, which are its result, or partial ones, kept where the first run's are.
  auto emit = [&](int of, int row, int dimension, float2 value, bool whole) {
    const int r = block_row + kWarpRows * of + row;
    if (r >= rows) return;
    const float2 end = end_of(of, row);
    if (whole) {
      half2 *const to = reinterpret_cast<half2 *>(args.out + static_cast<size_t>(query.first + r / heads) * args.out_stride +
                                                  (kv_head * heads + r % heads) * HEAD_DIM + dimension);
      *to = __floats2half2_rn(__fdividef(value.x, end.y), __fdividef(value.y, end.y));
    } else {
      const size_t at = row_of(first_unit + run, r);
      *reinterpret_cast<float2 *>(args.partial + at * HEAD_DIM + dimension) = value;
      if (dimension == 0) partial_ends[at] = end;
    }
  };
  // Adds up what each warp has put into `sums`.
  auto emit_sums = [&](bool whole) {
    __syncthreads();
    constexpr int kPairs = HEAD_DIM / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < kShape.rows() * kPairs; i += kShape.threads()) {
      const int of = i / (kWarpRows * kPairs), row = i / kPairs % kWarpRows, dimension = 2 * (i % kPairs);
      float2 value = make_float2(0, 0);
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2 *>(sums + ((of * kTokenWarps + w) * kWarpRows + row) * kStride + dimension);
        value.x += part.x;
        value.y += part.y;
      }
      emit(of, row, dimension, value, whole);
    }
  };
  float *const warp_sums = sums + (kTokenWarps > 1 ? warp * kWarpRows * kStride : 0);
  auto put = [&](int row, int dimension, float2 value, bool whole) {
    if (dimension >= HEAD_DIM) return;
    if constexpr (kTokenWarps > 1) {
      *reinterpret_cast<float2 *>(warp_sums + row * kStride + dimension) = value;
    } else {
      emit(row_warp, row, dimension, value, whole);
    }
  };
  if constexpr (kTokenWarps > 1) {
    float share[Products::kHeldRows];
#pragma unroll
    for (int r = 0; r < Products::kHeldRows; ++r) share[r] = exp2_fast(base[r] - end_of(row_warp, products.score_row(r)).x);
    products.scale(share);
  }
  products.each([&](int row, int dimension, float2 value) { put(row, dimension, value, count == 1); });
  if constexpr (kTokenWarps > 1) emit_sums(count == 1);
  if (count == 1) return;

  // Runs are added up by kRadix, those sums by kRadix, until one is left: each time by the last block of the group to come here, warp by
  // warp in order, so that the bits are always the same. It leaves the counter as it was.
  constexpr int kParts = ceil_div(HEAD_DIM, 64);  // of a row, two dimensions a lane
  __shared__ float weights[ROW_WARPS * kTokenWarps][kRadix][kWarpRows];
  __shared__ bool last;
  uint32_t *arrivals = args.arrivals;
  for (int width = 1; width < count; width *= kRadix) {
    const int first = run / (width * kRadix) * (width * kRadix), members = min(kRadix, ceil_div(count - first, width));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t *const arrived = arrivals + ((first_unit + first) * args.kv_heads + kv_head) * gridDim.z + blockIdx.z;
      last = atomicAdd(arrived, 1u) == members - 2u;  // the first finds 0xFFFFFFFF
      if (last || members == 1) *arrived = ~0u;
    }
    __syncthreads();
    if (!last && members > 1) return;
    __threadfence();
    arrivals += gridDim.x * args.kv_heads * gridDim.z;
    run = first;
    if (members == 1) continue;

    // Of a lane's row, every fourth member's end from its own on; written by other multiprocessors, so not from L1.
    const int row = products.lane % kWarpRows;
    auto partial_row = [&](int member, int r) { return row_of(first_unit + first + member * width, min(first_row + r, rows - 1)); };
    float2 own[kRadix * kWarpRows / 32], end = make_float2(kUnseen, 0);
#pragma unroll
    for (int i = 0; i < kRadix * kWarpRows / 32; ++i) {
      const int member = 32 / kWarpRows * i + products.lane / kWarpRows;
      own[i] = member < members ? __ldcg(partial_ends + partial_row(member, row)) : make_float2(kUnseen, 0);
      end.x = fmaxf(end.x, own[i].x);
    }
#pragma unroll
    for (int bit = kWarpRows; bit < 32; bit *= 2) end.x = fmaxf(end.x, __shfl_xor_sync(~0u, end.x, bit));
#pragma unroll
    for (int i = 0; i < kRadix * kWarpRows / 32; ++i) {
      const float weight = exp2_fast(own[i].x - end.x);
      weights[warp][32 / kWarpRows * i + products.lane / kWarpRows][row] = weight;
      end.y = fmaf(own[i].y, weight, end.y);
    }
#pragma unroll
    for (int bit = kWarpRows; bit < 32; bit *= 2) end.y += __shfl_xor_sync(~0u, end.y, bit);
    if (products.lane < kWarpRows) ends[row_warp][token_warp][row] = token_warp == 0 ? end : make_float2(kUnseen, 0);
    __syncwarp();

    float2 all[kWarpRows][kParts] = {};
#pragma unroll 2
    for (int member = token_warp; member < members; member += kTokenWarps) {
      float2 part[kWarpRows][kParts];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float2 *const from = reinterpret_cast<const float2 *>(args.partial + partial_row(member, r) * HEAD_DIM);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const int pair = products.lane + 32 * p;
          part[r][p] = 32 * p + 31 < HEAD_DIM / 2 || pair < HEAD_DIM / 2 ? __ldcg(from + pair) : make_float2(0, 0);
        }
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float weight = weights[warp][member][r];
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          all[r][p].x = fmaf(weight, part[r][p].x, all[r][p].x);
          all[r][p].y = fmaf(weight, part[r][p].y, all[r][p].y);
        }
      }
    }
    const bool whole = width * kRadix >= count;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) put(r, 2 * products.lane + 64 * p, all[r][p], whole);
    }
    if constexpr (kTokenWarps > 1) emit_sums(whole);
  }
}

}  // namespace voltserve
