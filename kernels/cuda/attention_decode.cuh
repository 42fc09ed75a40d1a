// out[t][h] = softmax(scale q[t][h] K^T) V over a paged fp16 cache, for requests of 1 .. 8 new tokens: the decoding step, and
// speculative tokens checked together. CUDA cores only. Softmax is online (Milakov and Gimelshein, arXiv 1805.02867), all sums fp32.
//
// The G query heads of a key head, times the new tokens, are the *rows*. A block works for up to 64 of them, so every byte of K
// and V comes from memory once; warps with other rows of the block load it again at about the same time, from L1. A warp holds
// ROWS of them: LANES lanes share a cached token, 8 dimensions each, so a lane keeps 8 dimensions of every row's query and of every
// row's sum in registers, a warp reads 32 / LANES tokens with one 128-bit load a lane, and keys and values never touch shared
// memory. Products over K are summed across lanes so that each lane ends with different (row, token) scores: 2 values an exchange
// instead of LANES - 1 additions each. The softmax works on those, and the weights go back to all lanes through a few hundred bytes
// of shared memory.
//
// All requests' positions are cut into runs of about equal length (split-KV), as many as the GPU holds blocks, found by each block
// from seq_lens: a batch of one long and many short requests is balanced, and a captured graph stays right. A request with several
// runs leaves sums, maxima and totals in `partial`, and attention_combine_kernel adds them in order: the same bits every time.
// Positions past a request's end are never read: a masked weight is 0, but 0 * NaN is not.
//
// Bytes: 4 * head_dim a position and key head. FFMAs: 8 ROWS of a warp for 512 bytes. A V100 has 64 clocks a multiprocessor for those
// bytes, of which 8 rows take 32; from 16 on (speculation, or more than 8 heads) the rows are the bound. An H200 has 29 clocks: of its
// read ceiling it reached 54-60 % at 8 rows, 77 % at 4, 80 % at 1 (8 requests of 8192 positions, 2026-11-30,
// docs/results/cuda-attention-h200-time-2026-11-30.json). A V100, computed from the machine code: 90-99 %.
#pragma once

#include "attention.cuh"
#include "attention_plan.h"

namespace voltserve {

// How the batch's positions are cut, the same for every block.
struct Runs {
  const AttentionArgs &args;
  int tile, run_tiles;

  // `divisor`: AttentionPlan::run_divisor.
  __device__ Runs(const AttentionArgs &a, int tile_, int divisor) : args(a), tile(tile_) {
    const int total = sum_over(args.requests, [&](int b) { return tiles(b); });
    // Shorter runs than 64 positions cost more in adding up than they gain.
    run_tiles = max(ceil_div(64, tile), ceil_div(total, divisor));
  }
  // The first position that request b's first token sees, down to a group of 8.
  __device__ int begin(const Query &query) const { return query.begin(0, args.window) & ~7; }
  __device__ int tiles(int b) const {
    const Query query(args, b);
    return query.count > 0 && query.count <= kDecodeTokens ? ceil_div(query.length - begin(query), tile) : 0;
  }
  __device__ int runs(int b) const { return ceil_div(tiles(b), run_tiles); }
};

// Sums values over the WIDTH lanes that share a token so that a lane ends with COUNT / WIDTH of the sums, or with one that WIDTH / COUNT
// lanes hold: from number lane / max(1, WIDTH / COUNT) * max(1, COUNT / WIDTH) on. The first ORDERED exchanges expect the
// value's number i at v[i ^ own], where own is the number of the first value that the lane will keep; then each
// keeps its first half and sends the second, with nothing to select.
template <int WIDTH, int COUNT, int ORDERED, int SIZE>
__device__ void sum_across(float (&v)[SIZE], int lane) {
  if constexpr (WIDTH > 1) {
    constexpr int kHalf = WIDTH / 2;
    if constexpr (COUNT > 1) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const bool upper = ORDERED == 0 && (lane & kHalf);
        const float sent = upper ? v[i] : v[i + COUNT / 2], kept = upper ? v[i + COUNT / 2] : v[i];
        v[i] = kept + __shfl_xor_sync(~0u, sent, kHalf);
      }
      sum_across<kHalf, COUNT / 2, ORDERED == 0 ? 0 : ORDERED - 1>(v, lane);
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], kHalf);
      sum_across<kHalf, 1, 0>(v, lane);
    }
  }
}

// LANES, ROWS, ROW_WARPS: decode_shape(). Grid: units, key heads, row blocks.
template <int LANES, int ROWS, int ROW_WARPS>
__global__ void __launch_bounds__(decode_shape(LANES, ROWS, ROW_WARPS).threads(), decode_shape(LANES, ROWS, ROW_WARPS).blocks_per_processor)
    attention_decode_kernel(const AttentionArgs args, int divisor, int partial_rows) {
  constexpr DecodeShape kShape = decode_shape(LANES, ROWS, ROW_WARPS);
  constexpr int kTokenWarps = kShape.token_warps, kSteps = kShape.steps, kTokens = 32 / LANES;
  constexpr int kValues = ROWS * kSteps;                               // scores of a lane group and tile
  constexpr int kHeld = kValues > LANES ? kValues / LANES : 1;         // of them, a lane's
  constexpr int kCopies = kValues > LANES ? 1 : LANES / kValues;       // lanes with the same ones
  constexpr int kRowLanes = kCopies * kSteps / kHeld;                  // lanes with the same row
  constexpr int kRowExchanges = ROWS == 8 ? 3 : ROWS == 4 ? 2 : ROWS == 2 ? 1 : 0;
  static_assert(kHeld <= kSteps, "a lane's scores are one row's");
  // Weights of a lane group: [step][row], then each row's correction. 8 more floats keep two groups in different banks.
  constexpr int kGroupFloats = kValues + (ROWS < 4 ? 4 : ROWS) + 8;
  constexpr int kDims = 8 * LANES;

  __shared__ __align__(16) float weights[ROW_WARPS * kTokenWarps][kTokens][kGroupFloats];
  __shared__ float maxima[ROW_WARPS][kTokenWarps * kTokens][ROWS], totals[ROW_WARPS][kTokenWarps * kTokens][ROWS];
  __shared__ __align__(16) float sums[kTokenWarps > 1 ? ROW_WARPS * kTokenWarps * ROWS * kDims : 1];

  const Runs runs(args, kShape.tile(), divisor);
  int first_unit;
  const int request = find_request(args.requests, blockIdx.x, first_unit, [&](int b) { return runs.runs(b); });
  if (request < 0) return;
  const Query query(args, request);
  const int heads = args.q_heads / args.kv_heads, kv_head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / LANES, chunk = lane % LANES;
  const int token_warp = warp % kTokenWarps, row_warp = warp / kTokenWarps;
  const int first_row = (blockIdx.z * ROW_WARPS + row_warp) * ROWS, rows = query.count * heads;
  if (blockIdx.z * ROW_WARPS * ROWS >= rows) return;

  // This block's run: tiles in equal shares, so that a request's last run is not a stub.
  const int tiles = runs.tiles(request), count = runs.runs(request), run = blockIdx.x - first_unit;
  const int first_tile = run * tiles / count, last_tile = (run + 1) * tiles / count;
  const int begin = runs.begin(query);

  // The scores that sum_across leaves to this lane: of one row, and of kHeld tokens from `held` on.
  const int held_row = chunk / kRowLanes, held = chunk % kRowLanes / kCopies * kHeld;
  const int held_token = min((first_row + held_row) / heads, query.count - 1);
  const int see_end = query.end(held_token), see_begin = query.begin(held_token, args.window);

  // Lanes past the head's last dimension multiply by 0, and what they sum is not written.
  const bool inside = 8 * chunk < args.head_dim;
  float q[ROWS][8];  // row r ^ held_row at r, as sum_across wants it
  {
    const float scale = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * kLog2e;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row + (r ^ held_row), token = row / heads, head = kv_head * heads + row % heads;
      uint4 halves = make_uint4(0, 0, 0, 0);
      if (inside && row < rows) {
        halves = *reinterpret_cast<const uint4 *>(args.q + static_cast<size_t>(query.first + token) * args.q_stride +
                                                  head * args.head_dim + 8 * chunk);
      }
      to_floats(halves, q[r]);
#pragma unroll
      for (int d = 0; d < 8; ++d) q[r][d] *= scale;
    }
  }

  const Pages pages(args, request, kv_head);
  const uint4 *const keys = reinterpret_cast<const uint4 *>(args.k_cache) + (inside ? chunk : 0);
  const uint4 *const values = reinterpret_cast<const uint4 *>(args.v_cache) + (inside ? chunk : 0);
  // The lane group's first token of a tile; its kSteps tokens share a group of 8 positions.
  auto token_of = [&](int tile) { return begin + ((tile * kTokenWarps + token_warp) * kTokens + group) * kSteps; };
  // Where its tokens are, in 16 bytes; what is past the request's end is read from its last position.
  auto locate = [&](int token, int (&at)[kSteps]) {
    const int first = min(token, (query.length - 1) & ~(kSteps - 1)), last = query.length - 1 - first;
    const int start = pages.chunk(first);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) at[s] = start + min(s, last) * args.token_chunks;
  };
  auto load = [&](const uint4 *from, const int (&at)[kSteps], uint4 (&to)[kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) to[s] = __ldg(from + at[s]);
  };

  float sum[ROWS][8] = {};
  float maximum = -INFINITY, total = 0;
  float *const mine = weights[warp][group];
  uint4 k[kSteps], v[kSteps];
  int at[kSteps];
  locate(token_of(first_tile), at);
  load(keys, at, k);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int token = token_of(tile);
    load(values, at, v);

    float score[kValues];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float key[8];
      to_floats(k[s], key);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float dot = q[r][0] * key[0];
#pragma unroll
        for (int d = 1; d < 8; ++d) dot = fmaf(q[r][d], key[d], dot);
        score[r * kSteps + s] = dot;
      }
    }
    if (tile + 1 < last_tile) {
      locate(token_of(tile + 1), at);
      load(keys, at, k);
    }
    sum_across<LANES, kValues, kRowExchanges>(score, lane);

    float highest = maximum;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (args.soft_cap > 0) score[i] = capped(score[i], args.soft_cap * kLog2e);
      const int position = token + held + i;
      if (position < see_begin || position >= see_end) score[i] = -INFINITY;
      highest = fmaxf(highest, score[i]);
    }
#pragma unroll
    for (int width = kCopies; width < kRowLanes; width *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, width));
    // While a row has seen nothing its maximum is -infinity, of which no difference may be taken.
    const float base = highest == -INFINITY ? 0 : highest;
    const float correction = exp2_fast(maximum - base);
    maximum = highest;
    total *= correction;
    __syncwarp();  // the previous tile's weights have been read
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float weight = exp2_fast(score[i] - base);
      total += weight;
      mine[(held + i) * ROWS + held_row] = weight;
    }
    const bool corrects = __any_sync(~0u, correction != 1);
    if (corrects) mine[kValues + held_row] = correction;
    __syncwarp();
    if (corrects) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float factor = mine[kValues + r];
#pragma unroll
        for (int d = 0; d < 8; ++d) sum[r][d] *= factor;
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float value[8];
      to_floats(v[s], value);
      float weight[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) weight[r] = mine[s * ROWS + r];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int d = 0; d < 8; ++d) sum[r][d] = fmaf(weight[r], value[d], sum[r][d]);
      }
    }
  }

  // The lane groups and token warps of a row meet: each scales its sums to the highest maximum of all.
#pragma unroll
  for (int width = kCopies; width < kRowLanes; width *= 2) total += __shfl_xor_sync(~0u, total, width);
  if (chunk % kRowLanes == 0) {
    maxima[row_warp][token_warp * kTokens + group][held_row] = maximum;
    totals[row_warp][token_warp * kTokens + group][held_row] = total;
  }
  __syncthreads();
  float highest[ROWS], all[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    highest[r] = -INFINITY;
    all[r] = 0;
#pragma unroll
    for (int g = 0; g < kTokenWarps * kTokens; ++g) highest[r] = fmaxf(highest[r], maxima[row_warp][g][r]);
    const float base = highest[r] == -INFINITY ? 0 : highest[r];
#pragma unroll
    for (int g = 0; g < kTokenWarps * kTokens; ++g) {
      all[r] = fmaf(totals[row_warp][g][r], exp2_fast(maxima[row_warp][g][r] - base), all[r]);
    }
    const float factor = exp2_fast(maxima[row_warp][token_warp * kTokens + group][r] - base);
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      sum[r][d] *= factor;
#pragma unroll
      for (int width = LANES; width < 32; width *= 2) sum[r][d] += __shfl_xor_sync(~0u, sum[r][d], width);
    }
  }
  if constexpr (kTokenWarps > 1) {
    float *const at = sums + ((row_warp * kTokenWarps + token_warp) * ROWS) * kDims + 8 * chunk;
    if (group == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        *reinterpret_cast<float4 *>(at + r * kDims) = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        *reinterpret_cast<float4 *>(at + r * kDims + 4) = make_float4(sum[r][4], sum[r][5], sum[r][6], sum[r][7]);
      }
    }
    __syncthreads();
  }
  const size_t unit = static_cast<size_t>(blockIdx.x) * args.kv_heads + kv_head;
  const size_t partials = static_cast<size_t>(gridDim.x) * args.kv_heads * partial_rows;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + r;
    // Rows are dealt out to the lane groups and token warps that could write them.
    if (r % (kTokenWarps * kTokens) != token_warp * kTokens + group || row >= rows) continue;
    float total_sum[8];
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      total_sum[d] = kTokenWarps > 1 ? 0 : sum[r][d];
#pragma unroll
      for (int w = 0; kTokenWarps > 1 && w < kTokenWarps; ++w) {
        total_sum[d] += sums[((row_warp * kTokenWarps + w) * ROWS + r) * kDims + 8 * chunk + d];
      }
    }
    if (!inside) continue;
    if (count == 1) {
      const int head = kv_head * heads + row % heads;
#pragma unroll
      for (int d = 0; d < 8; ++d) total_sum[d] = __fdividef(total_sum[d], all[r]);
      *reinterpret_cast<uint4 *>(args.out + static_cast<size_t>(query.first + row / heads) * args.out_stride +
                                 head * args.head_dim + 8 * chunk) = to_halves(total_sum);
    } else {
      float4 *const to = reinterpret_cast<float4 *>(args.partial + (unit * partial_rows + row) * args.head_dim + 8 * chunk);
      to[0] = make_float4(total_sum[0], total_sum[1], total_sum[2], total_sum[3]);
      to[1] = make_float4(total_sum[4], total_sum[5], total_sum[6], total_sum[7]);
      if (chunk == 0) {
        reinterpret_cast<float2 *>(args.partial + partials * args.head_dim)[unit * partial_rows + row] = make_float2(highest[r], all[r]);
      }
    }
  }
}

constexpr int kCombineThreads = 256, kCombineAtOnce = 8;

// Adds a row's partial results: out = sum_i 2^(m_i - m) s_i / sum_i 2^(m_i - m) l_i, in the order of i for each of the slots that
// share the runs, then in the order of the slots. Loads of several runs at once: one after the other, their latency would be most
// of a short step's time. Grid: requests, key heads, rows. `units`: the decoding kernel's blocks along x; `tile`: its tile.
template <int HEAD_DIM>
__global__ void __launch_bounds__(kCombineThreads)
    attention_combine_kernel(const AttentionArgs args, int divisor, int partial_rows, int units, int tile) {
  constexpr int kQuads = HEAD_DIM / 4, kSlots = kCombineThreads / kQuads;  // threads across the head, and runs side by side
  __shared__ float4 slot_sums[kSlots][kQuads];
  __shared__ float weights[kMaxRuns];
  const int request = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z, heads = args.q_heads / args.kv_heads;
  const Query query(args, request);
  if (query.count > kDecodeTokens || row >= query.count * heads) return;
  const Runs runs(args, tile, divisor);
  const int count = runs.runs(request);
  if (count <= 1) return;
  const int first_unit = sum_over(request, [&](int b) { return runs.runs(b); });
  const float2 *const ends = reinterpret_cast<const float2 *>(
      args.partial + static_cast<size_t>(units) * args.kv_heads * partial_rows * HEAD_DIM);
  auto index = [&](int i) { return (static_cast<size_t>(first_unit + i) * args.kv_heads + kv_head) * partial_rows + row; };

  // Every warp finds the maximum and the total; the first keeps the weights for all.
  float highest = -INFINITY;
  for (int i = threadIdx.x % 32; i < count; i += 32) highest = fmaxf(highest, ends[index(i)].x);
#pragma unroll
  for (int width = 16; width > 0; width /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, width));
  float total = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const float2 end = ends[index(i)];
    const float weight = exp2_fast(end.x - highest);
    if (threadIdx.x < 32) weights[i] = weight;
    total = fmaf(end.y, weight, total);
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) total += __shfl_xor_sync(~0u, total, width);
  __syncthreads();

  const int quad = threadIdx.x % kQuads, slot = threadIdx.x / kQuads;
  if (slot < kSlots) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = slot; i < count; i += kCombineAtOnce * kSlots) {
      float4 parts[kCombineAtOnce];
#pragma unroll
      for (int p = 0; p < kCombineAtOnce; ++p) {
        parts[p] = make_float4(0, 0, 0, 0);
        if (i + p * kSlots < count) {
          parts[p] = __ldcg(reinterpret_cast<const float4 *>(args.partial + index(i + p * kSlots) * HEAD_DIM) + quad);
        }
      }
#pragma unroll
      for (int p = 0; p < kCombineAtOnce; ++p) {
        const float weight = weights[min(i + p * kSlots, count - 1)];
        sum.x = fmaf(parts[p].x, weight, sum.x);
        sum.y = fmaf(parts[p].y, weight, sum.y);
        sum.z = fmaf(parts[p].z, weight, sum.z);
        sum.w = fmaf(parts[p].w, weight, sum.w);
      }
    }
    slot_sums[slot][quad] = sum;
  }
  __syncthreads();
  if (slot != 0) return;
  float4 sum = slot_sums[0][quad];
#pragma unroll
  for (int s = 1; s < kSlots; ++s) {
    const float4 other = slot_sums[s][quad];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  const int head = kv_head * heads + row % heads;
  half2 *const out = reinterpret_cast<half2 *>(args.out + static_cast<size_t>(query.first + row / heads) * args.out_stride +
                                               head * HEAD_DIM + 4 * quad);
  out[0] = __floats2half2_rn(__fdividef(sum.x, total), __fdividef(sum.y, total));
  out[1] = __floats2half2_rn(__fdividef(sum.z, total), __fdividef(sum.w, total));
}

}  // namespace voltserve
