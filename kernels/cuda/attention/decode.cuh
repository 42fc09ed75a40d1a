// Decoding attention, from how the batch is cut to the last sum one kernel, and so one long file:
//
// out[t][h] = softmax(scale q[t][h] K^T) V over a paged fp16 cache, for requests of 1 .. 8 new tokens: the decoding step, and
// speculative tokens checked together, on tensor cores (decode_mma.cuh). Scores, softmax (online, Milakov and Gimelshein,
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
// Bytes: 4 * head_dim a position and key head. Of its read ceiling an H200 reached 77-87 % with 8 key heads and more, 70 % with 4 and 66 %
// with 2 of 256 (8 requests of 8192 positions, 2026-11-30, docs/results/cuda-attention-h200-time-2026-11-30.json): 13 us do not depend on
// the bytes, see docs/results/cuda-attention-h200-clocks-2026-11-30.json. A V100, computed from the machine code: 94-99 %.
#pragma once

#include "cuda/attention/pages.cuh"
#include "cuda/attention/decode_mma.cuh"
#include "cuda/attention/plan.h"
#include "cuda/common/dependent.cuh"

namespace voltserve {

constexpr int kShortestRun = 64;  // positions
constexpr int kRadix = 16;        // runs that are added up at once

// How the batch's positions are cut, the same for every block.
struct Runs {
  const AttentionArgs &args;
  int tile, own_tiles;  // own_tiles: of the request that is this lane's number, which most batches have no more of
  int run_tiles;
  float reciprocal;  // of run_tiles

  // `units`: AttentionPlan::units, which the runs must not exceed.
  __device__ Runs(const AttentionArgs &a, int tile_, int units) : args(a), tile(tile_) {
    const int lane = threadIdx.x % 32;
    own_tiles = lane < args.requests ? look(lane) : 0;
    const int total = sum_over(args.requests, [&](int b) { return tiles(b); });
    // The shortest runs that are few enough: blocks finish together if the GPU is full of them. Every request may end a run before it is
    // full, so as many fewer are always enough.
    int low = max(1, ceil_div(total, units)), high = max(low, ceil_div(total, max(1, units - args.requests)));
    while (low < high) {
      set((low + high) / 2);
      if (sum_over(args.requests, [&](int b) { return runs(b); }) <= units) {
        high = run_tiles;
      } else {
        low = run_tiles + 1;
      }
    }
    // Shorter runs than kShortestRun positions cost more in adding up than they gain.
    set(max(low, kShortestRun / tile));
  }
  __device__ void set(int length) {
    run_tiles = length;
    reciprocal = __frcp_rn(static_cast<float>(length));
  }
  // The first position that request b's first token sees, down to a group of 8.
  __device__ int begin(const Query &query) const { return query.begin(0, args.window) & ~7; }
  __device__ int look(int b) const {
    const Query query(args, b);
    return query.count > 0 && query.count <= kDecodeTokens ? ceil_div(query.length - begin(query), tile) : 0;
  }
  // Of request b, asked for by lane b % 32.
  __device__ int tiles(int b) const { return b < 32 ? own_tiles : look(b); }
  // As ceil_div: exact, as tiles and run_tiles are below 2^20.
  __device__ int runs_of(int tiles) const { return static_cast<int>((static_cast<float>(tiles + run_tiles - 1) + 0.5f) * reciprocal); }
  __device__ int runs(int b) const { return runs_of(tiles(b)); }
};

// The most runs, a power of two, whose `fours` float4 are no more than `most` in all.
VOLTSERVE_BOTH constexpr int members_at_once(int fours, int most) {
  int members = kRadix;
  while (members > 1 && members * fours > most) members /= 2;
  return members;
}

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
  // Of each warp: its part of q, if registers do not hold that beside keys, values and sums; then its sums.
  constexpr bool kShareQuery = HEAD_DIM > 128;
  constexpr int kQueryFloats = kShareQuery ? 128 * kKeyChunks : 0, kSumFloats = kTokenWarps > 1 ? kWarpRows * kStride : 0;
  constexpr int kFloats = kQueryFloats > kSumFloats ? kQueryFloats : kSumFloats;
  __shared__ __align__(16) float of_warps[ROW_WARPS * kTokenWarps][kFloats > 0 ? kFloats : 4];

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
  const int begin = runs.begin(query), tiles = ceil_div(query.length - begin, kShape.tile()), count = runs.runs_of(tiles);
  int run = blockIdx.x - first_unit;
  const int first_tile = run * tiles / count, last_tile = (run + 1) * tiles / count;
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
      if (kShareQuery) reinterpret_cast<uint4 *>(of_warps[warp])[32 * j + products.lane] = q[j];
    }
  }
  auto query_chunk = [&](int j) { return kShareQuery ? reinterpret_cast<const uint4 *>(of_warps[warp])[32 * j + products.lane] : q[j]; };

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
  // Where the groups of 8 positions of the next 16 tiles are, a lane each, and of 16 more: looked up long before they are needed, since
  // the table comes from memory as the keys do. The request's last group stands in for one past its end.
  constexpr int kAhead = 16;
  auto look_up = [&](int tile) { return pages.chunk(min(position_of(tile + products.lane / 2) + 8 * (products.lane % 2), last_eight)); };
  int near = look_up(first_tile), far = look_up(first_tile + kAhead);
  auto start_of = [&](int tile, int u) { return __shfl_sync(~0u, near, 2 * ((tile - first_tile) % kAhead) + u); };
  // Position `number` of the tile's group u, which starts at `start`, or the request's last one.
  auto chunk_of = [&](int tile, int u, int start, int number) {
    const int first = min(position_of(tile) + 8 * u, last_eight);
    return start + min(number, query.length - 1 - first) * args.token_chunks;
  };
  uint4 k[2][kKeyChunks], v[4][kGroups];
  auto load_keys = [&](int tile) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int chunk = chunk_of(tile, u, start_of(tile, u), products.key_position());
      const uint4 *const from = reinterpret_cast<const uint4 *>(args.k_cache) + chunk;
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) k[u][j] = from[inside(products.key_chunk() + 4 * j, 4 * j + 3)];
    }
  };
  auto load_values = [&](int tile) {
    const int start[2] = {start_of(tile, 0), start_of(tile, 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = chunk_of(tile, i / 2, start[i / 2], products.value_position(i));
      const uint4 *const from = reinterpret_cast<const uint4 *>(args.v_cache) + chunk;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) v[i][g] = from[inside(products.value_chunk() + 8 * g, 8 * g + 7)];
    }
  };

  const float factor = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * kLog2e;
  float base[Products::kHeldRows], total[Products::kHeldRows] = {};
#pragma unroll
  for (int r = 0; r < Products::kHeldRows; ++r) base[r] = kUnseen;
  load_keys(first_tile);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    load_values(tile);
    __syncwarp();  // or the compiler moves the loads past the products, which wait for the keys
    // After the last tile its keys are loaded again, from L1: a branch around the loads would cost as many moves.
    const int next_tile = min(tile + 1, last_tile - 1);
    if (next_tile > tile && (next_tile - first_tile) % kAhead == 0) {
      near = far;
      far = look_up(next_tile + kAhead);
    }
    float score[Products::kHeldRows][Products::kHeldPositions];
    products.scores(query_chunk, k, score);
    load_keys(next_tile);

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
  }

  // The warps of a row meet: each row's base and total, and below its sums.
#pragma unroll
  for (int r = 0; r < Products::kHeldRows; ++r) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if (Products::kRowBits & bit) total[r] += __shfl_xor_sync(~0u, total[r], bit);
    }
    if ((products.lane & Products::kRowBits) == 0) ends[row_warp][token_warp][products.score_row(r)] = make_float2(base[r], total[r]);
  }
  // From here on a thread has a row of the block, and four of every 4 kRowThreads dimensions.
  constexpr int kRowThreads = kShape.threads() / kShape.rows(), kFours = ceil_div(HEAD_DIM, 4 * kRowThreads);
  const int own_row = threadIdx.x / kRowThreads, own_part = threadIdx.x % kRowThreads;
  auto dimension_of = [&](int i) { return 4 * (own_part + kRowThreads * i); };
  auto inside_head = [&](int i) { return 4 * kRowThreads * (i + 1) <= HEAD_DIM || dimension_of(i) < HEAD_DIM; };
  auto add = [](float4 &to, float weight, const float4 &value) {
    to.x = fmaf(weight, value.x, to.x);
    to.y = fmaf(weight, value.y, to.y);
    to.z = fmaf(weight, value.z, to.z);
    to.w = fmaf(weight, value.w, to.w);
  };

  // Where a run's partial results are: sums, then bases and totals.
  auto row_of = [&](int unit, int row) { return (static_cast<size_t>(unit) * args.kv_heads + kv_head) * partial_rows + row; };
  float2 *const partial_ends =
      reinterpret_cast<float2 *>(args.partial + static_cast<size_t>(gridDim.x) * args.kv_heads * partial_rows * HEAD_DIM);
  auto put_result = [&](int r, int dimension, float x, float y, float total_weight) {
    half2 *const to = reinterpret_cast<half2 *>(args.out + static_cast<size_t>(query.first + r / heads) * args.out_stride +
                                                (kv_head * heads + r % heads) * HEAD_DIM + dimension);
    *to = __floats2half2_rn(__fdividef(x, total_weight), __fdividef(y, total_weight));
  };
  // This thread's sums over runs: of the whole request, which are its result, or partial ones, kept where the first run's are.
  auto leave = [&](const float4 (&value)[kFours], float2 end, bool whole) {
    const int r = block_row + own_row;
    if (r >= rows) return;
    const size_t at = row_of(first_unit + run, r);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (!inside_head(i)) continue;
      if (whole) {
        put_result(r, dimension_of(i), value[i].x, value[i].y, end.y);
        put_result(r, dimension_of(i) + 2, value[i].z, value[i].w, end.y);
      } else {
        *reinterpret_cast<float4 *>(args.partial + at * HEAD_DIM + dimension_of(i)) = value[i];
      }
    }
    if (!whole && own_part == 0) partial_ends[at] = end;
  };

  if constexpr (kTokenWarps > 1) {
    // The warps with the same rows meet.
    __syncwarp();  // before sums take the place of q
    float *const warp_sums = of_warps[warp];
    products.each([&](int row, int dimension, float2 value) {
      if (dimension < HEAD_DIM) *reinterpret_cast<float2 *>(warp_sums + row * kStride + dimension) = value;
    });
    __syncthreads();
    float2 end = make_float2(kUnseen, 0);
    float weight[kTokenWarps];
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) end.x = fmaxf(end.x, ends[own_row / kWarpRows][w][own_row % kWarpRows].x);
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      const float2 of_warp = ends[own_row / kWarpRows][w][own_row % kWarpRows];
      weight[w] = exp2_fast(of_warp.x - end.x);
      end.y = fmaf(of_warp.y, weight[w], end.y);
    }
    float4 value[kFours] = {};
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      const float *const from = of_warps[own_row / kWarpRows * kTokenWarps + w] + own_row % kWarpRows * kStride;
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        if (inside_head(i)) add(value[i], weight[w], *reinterpret_cast<const float4 *>(from + dimension_of(i)));
      }
    }
    leave(value, end, count == 1);
  } else {
    __syncwarp();
    products.each([&](int row, int dimension, float2 value) {
      const int r = first_row + row;
      if (dimension >= HEAD_DIM || r >= rows) return;
      const float2 end = ends[row_warp][0][row];
      const size_t at = row_of(first_unit + run, r);
      if (count == 1) {
        put_result(r, dimension, value.x, value.y, end.y);
      } else {
        *reinterpret_cast<float2 *>(args.partial + at * HEAD_DIM + dimension) = value;
        if (dimension == 0) partial_ends[at] = end;
      }
    });
  }
  if (count == 1) return;

  // Runs are added up by kRadix, those sums by kRadix, until one is left: each time by the last block of the group to come here, in order,
  // so that the bits are always the same. It leaves the counter as it was.
  constexpr int kAtOnce = members_at_once(kFours, kTokenWarps == 4 && HEAD_DIM > 64 ? 32 : 16);
  __shared__ float weights[kShape.rows()][kRadix];
  __shared__ bool last;
  uint32_t *arrivals = args.arrivals;
  for (int width = 1; width < count; width *= kRadix) {
    const int first = run / (width * kRadix) * (width * kRadix), members = min(kRadix, ceil_div(count - first, width));
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t *const arrived = arrivals + ((first_unit + first) * args.kv_heads + kv_head) * gridDim.z + blockIdx.z;
      // Releases what the block wrote before the barrier, and acquires what the others did; the first finds 0xFFFFFFFF.
      uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
      last = before == members - 2u;
      if (last || members == 1) *arrived = ~0u;
    }
    __syncthreads();
    if (!last && members > 1) return;
    arrivals += gridDim.x * args.kv_heads * gridDim.z;
    run = first;
    if (members == 1) continue;

    // Written by other multiprocessors, so not from L1. A thread looks at a few members' ends of its row, and at all members' sums.
    auto partial_of = [&](int member) { return row_of(first_unit + first + member * width, min(block_row + own_row, rows - 1)); };
    constexpr int kEnds = kRadix / kRowThreads;
    float2 own[kEnds];
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const int member = own_part + kRowThreads * i;
      own[i] = member < members ? __ldcg(partial_ends + partial_of(member)) : make_float2(kUnseen, 0);
    }
    float4 part[kAtOnce][kFours];
    auto load = [&](int from) {
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        const float4 *const row = reinterpret_cast<const float4 *>(args.partial + partial_of(from + m) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          part[m][i] = from + m < members && inside_head(i) ? __ldcg(row + dimension_of(i) / 4) : make_float4(0, 0, 0, 0);
        }
      }
    };
    load(0);
    float2 end = make_float2(kUnseen, 0);
#pragma unroll
    for (int i = 0; i < kEnds; ++i) end.x = fmaxf(end.x, own[i].x);
#pragma unroll
    for (int bit = 1; bit < kRowThreads; bit *= 2) end.x = fmaxf(end.x, __shfl_xor_sync(~0u, end.x, bit));
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const float weight = exp2_fast(own[i].x - end.x);
      weights[own_row][own_part + kRowThreads * i] = weight;
      end.y = fmaf(own[i].y, weight, end.y);
    }
#pragma unroll
    for (int bit = 1; bit < kRowThreads; bit *= 2) end.y += __shfl_xor_sync(~0u, end.y, bit);
    __syncwarp();
    float4 value[kFours] = {};
    for (int from = 0;;) {
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) add(value[i], weights[own_row][from + m], part[m][i]);
      }
      from += kAtOnce;
      if (from >= members) break;
      load(from);
    }
    leave(value, end, width * kRadix >= count);
  }
}

}  // namespace voltserve
