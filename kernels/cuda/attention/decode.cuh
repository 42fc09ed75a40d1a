// Decoding attention over a paged fp16 cache, for requests of 1 to 8 new tokens. One long file, since it is one kernel from the
// split of work to the last sum:
//
//     out[t][h] = softmax(scale * q[t][h] K^T) V
//
// One token is a decoding step; several are speculative tokens that are verified together.
//
// Numerics. Products split on tensor cores (decode_mma.cuh). Scores, the online softmax (Milakov and Gimelshein, arXiv 1805.02867)
// and sums are fp32. The softmax's weights are rounded to fp16 for their product with V, whose values are fp16 too.
//
// Split of work. The *rows* of a key head are its G query heads times the new tokens. A block takes up to 64 rows, 8 per warp:
//
//                     positions of one request's split  ->
//     rows 0-7        warp 0 | warp 1 | warp 0 | warp 1 ...      token warps take alternate tiles of 16 positions
//     rows 8-15       warp 2 | warp 3 | warp 2 | warp 3 ...      row warps read the same bytes at about the same time, from L1
//
// So memory delivers every byte of K and V once. A warp loads keys and values straight into the registers that feed its tensor
// cores; neither passes through shared memory.
//
// Split-KV (decode_splits.cuh). All requests' positions are cut into splits of about equal length, as many as the GPU holds blocks.
// Each block finds its split from seq_lens. So a batch of one long and many short requests is balanced, and a captured graph stays
// right when lengths grow. A request of several splits leaves each split's sums, bases and totals in `partial`. The block that
// arrives last adds them in order (merge_splits), so results have the same bits every time.
//
// Positions past a request's end are never read: their weight would be 0, but 0 * NaN is NaN.
//
// Bytes: 4 * head_dim per position and key head. Fraction of the read ceiling, 8 requests of 8192 positions, measured on an H200
// on 2026-11-30: 77-87 % with 8 key heads or more, 70 % with 4, 66 % with 2 of size 256
// (docs/results/cuda-attention-h200-time-2026-11-30.json). 13 us of each launch do not depend on the bytes
// (docs/results/cuda-attention-h200-clocks-2026-11-30.json). On a V100, computed from the machine code: 94-99 %.
#pragma once

#include "cuda/attention/decode_mma.cuh"
#include "cuda/attention/decode_splits.cuh"
#include "cuda/attention/pages.cuh"
#include "cuda/attention/plan.h"
#include "cuda/common/dependent.cuh"

namespace voltserve {

// The softmax's weights are 2^(score - base). A row's base rises only when a weight would pass 2^kMostWeight; then the largest
// weight becomes 2^kUsualWeight. So sums are rarely rescaled, and fp16 holds weights down to 2^-(24 + kUsualWeight) of the largest.
constexpr float kMostWeight = 15, kUsualWeight = 7;
constexpr float kUnseen = -1e30f;  // the base of a row that has seen no position; finite, so that differences are numbers
constexpr int kPadding = 8;        // floats between rows of sums in shared memory, against bank conflicts

// What a block works on: a split of one request's positions, for the rows of one key head.
struct DecodeWork {
  const AttentionArgs &args;
  const Query query;
  const int kv_head, heads;      // heads: query heads per key head
  const int block_row, rows;     // the block's first row; the key head's rows
  const int first_split, count;  // the request's first split among all, and its number of splits
  const int begin;               // the position from which tiles are counted
  int first_tile, last_tile;
  int split;  // this block's; merge_splits() moves it to the first of the splits that it has added up

  // Token and query head of a row of the key head.
  __device__ int token(int row) const { return row / heads; }
  __device__ int head(int row) const { return kv_head * heads + row % heads; }
};

// Loads a warp's tiles of keys and values into registers.
template <int HEAD_DIM, int TOKEN_WARPS>
struct TileReader {
  using Products = DecodeProducts<HEAD_DIM>;
  static constexpr int kKeyChunks = Products::kKeyChunks, kGroups = Products::kGroups, kChunks = HEAD_DIM / 8;
  // A lane looks up one group of 8 positions of the next 16 tiles in the block table, and one of the 16 after those. Table entries
  // are loaded from memory just as keys are, so they are looked up long before they are needed.
  static constexpr int kAhead = 16;

  const DecodeWork &work;
  const Products &products;
  const Pages pages;
  const int token_warp, last_eight;
  int near, far;

  __device__ TileReader(const DecodeWork &w, const Products &p, int request, int token_warp_)
      : work(w), products(p), pages(w.args, request, w.kv_head), token_warp(token_warp_), last_eight((w.query.length - 1) & ~7) {
    near = look_up(work.first_tile);
    far = look_up(work.first_tile + kAhead);
  }
  __device__ int position(int tile) const { return work.begin + (tile * TOKEN_WARPS + token_warp) * kWarpPositions; }
  // The request's last group stands in for a group past its end.
  __device__ int look_up(int tile) const {
    return pages.chunk(min(position(tile + products.lane / 2) + 8 * (products.lane % 2), last_eight));
  }
  // To be called before each tile but the first.
  __device__ void advance_to(int tile) {
    if ((tile - work.first_tile) % kAhead == 0) {
      near = far;
      far = look_up(tile + kAhead);
    }
  }
  // The first chunk of the tile's group u of 8 positions.
  __device__ int start(int tile, int u) const { return __shfl_sync(~0u, near, 2 * ((tile - work.first_tile) % kAhead) + u); }
  // Position `number` of group u, which starts at `start`; the request's last position stands in for one past its end.
  __device__ int chunk(int tile, int u, int start, int number) const {
    const int first = min(position(tile) + 8 * u, last_eight);
    return start + min(number, work.query.length - 1 - first) * work.args.token_chunks;
  }
  // Chunk 0 stands in for chunks past the head's last. Those are multiplied by 0, and their sums are not written.
  static __device__ int inside(int chunk, int last) { return last < kChunks || chunk < kChunks ? chunk : 0; }

  __device__ void load_keys(int tile, uint4 (&k)[2][kKeyChunks]) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int first = chunk(tile, u, start(tile, u), products.key_position());
      const uint4 *const from = reinterpret_cast<const uint4 *>(work.args.k_cache) + first;
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) k[u][j] = from[inside(products.key_chunk() + 4 * j, 4 * j + 3)];
    }
  }
  __device__ void load_values(int tile, uint4 (&v)[4][kGroups]) const {
    const int starts[2] = {start(tile, 0), start(tile, 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = chunk(tile, i / 2, starts[i / 2], products.value_position(i));
      const uint4 *const from = reinterpret_cast<const uint4 *>(work.args.v_cache) + first;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) v[i][g] = from[inside(products.value_chunk() + 8 * g, 8 * g + 7)];
    }
  }
};

// The online softmax of the rows whose scores this lane holds.
template <class Products>
struct OnlineSoftmax {
  static constexpr int kRows = Products::kHeldRows, kPositions = Products::kHeldPositions;

  const float factor, soft_cap;
  int see_begin[kRows], see_end[kRows];  // the positions that each row sees
  int all_see_begin, all_see_end;        // those that all rows of the warp see
  float base[kRows], total[kRows] = {};

  __device__ OnlineSoftmax(const DecodeWork &work, const Products &products, int first_row)
      : factor(work.args.soft_cap > 0 ? work.args.scale / work.args.soft_cap : work.args.scale * kLog2e),
        soft_cap(work.args.soft_cap) {
    auto token_of = [&](int row) { return work.token(min(first_row + row, work.rows - 1)); };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int token = token_of(products.score_row(r));
      see_begin[r] = work.query.begin(token, work.args.window);
      see_end[r] = work.query.end(token);
    }
    all_see_begin = work.query.begin(token_of(kWarpRows - 1), work.args.window);
    all_see_end = work.query.end(token_of(0));
#pragma unroll
    for (int r = 0; r < kRows; ++r) base[r] = kUnseen;
  }

  // Turns a tile's products q k into weights, and adds the weights to the totals. Rescales the products' sums where a base rises.
  __device__ void weigh(float (&score)[kRows][kPositions], int position, Products &products) {
    scale(score);
    mask(score, position, products);
    raise_bases(score, products);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        score[r][i] = exp2_fast(score[r][i] - base[r]);
        total[r] += score[r][i];
      }
    }
  }
  // To the scale of powers of two, and within the soft cap.
  __device__ void scale(float (&score)[kRows][kPositions]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPositions; ++i) score[r][i] *= factor;
    }
    if (soft_cap > 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kPositions; ++i) score[r][i] = capped(score[r][i], soft_cap * kLog2e);
      }
    }
  }
  __device__ void mask(float (&score)[kRows][kPositions], int position, const Products &products) const {
    if (position >= all_see_begin && position + kWarpPositions <= all_see_end) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPositions; ++i) {
        const int at = position + products.score_position(i);
        if (at < see_begin[r] || at >= see_end[r]) score[r][i] = -INFINITY;
      }
    }
  }
  __device__ void raise_bases(const float (&score)[kRows][kPositions], Products &products) {
    float highest[kRows];
    bool raises = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      highest[r] = score[r][0];
#pragma unroll
      for (int i = 1; i < kPositions; ++i) highest[r] = fmaxf(highest[r], score[r][i]);
      raises |= highest[r] > base[r] + kMostWeight;
    }
    if (!__any_sync(~0u, raises)) return;
    float correction[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
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
  // Each row's base and total, to `ends`; lanes with the same rows have summed their totals then.
  __device__ void finish(const Products &products, float2 (&ends)[kWarpRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) {
        if (Products::kRowBits & bit) total[r] += __shfl_xor_sync(~0u, total[r], bit);
      }
      if ((products.lane & Products::kRowBits) == 0) ends[products.score_row(r)] = make_float2(base[r], total[r]);
    }
  }
};

// After the walk a thread owns one row of the block, and four of every 4 * kRowThreads dimensions of it.
template <int HEAD_DIM, int ROW_WARPS>
struct RowOwner {
  static constexpr DecodeShape kShape = decode_shape(HEAD_DIM, ROW_WARPS);
  static constexpr int kRowThreads = kShape.threads() / kShape.rows(), kFours = ceil_div(HEAD_DIM, 4 * kRowThreads);

  const DecodeWork &work;
  const int partial_rows;
  const int row, part;
  float2 *const partial_ends;

  __device__ RowOwner(const DecodeWork &w, int partial_rows_)
      : work(w),
        partial_rows(partial_rows_),
        row(threadIdx.x / kRowThreads),
        part(threadIdx.x % kRowThreads),
        partial_ends(reinterpret_cast<float2 *>(w.args.partial +
                                                static_cast<size_t>(gridDim.x) * w.args.kv_heads * partial_rows_ * HEAD_DIM)) {}
  __device__ int dimension(int i) const { return 4 * (part + kRowThreads * i); }
  __device__ bool inside_head(int i) const { return 4 * kRowThreads * (i + 1) <= HEAD_DIM || dimension(i) < HEAD_DIM; }
  // Where a split's partial results are, counted in rows: sums, and after all sums bases and totals.
  __device__ size_t partial_row(int split, int r) const {
    return (static_cast<size_t>(split) * work.args.kv_heads + work.kv_head) * partial_rows + r;
  }
  __device__ void put_result(int r, int dimension, float x, float y, float total_weight) const {
    half2 *const to =
        reinterpret_cast<half2 *>(work.args.out + static_cast<size_t>(work.query.first + work.token(r)) * work.args.out_stride +
                                  work.head(r) * HEAD_DIM + dimension);
    *to = __floats2half2_rn(__fdividef(x, total_weight), __fdividef(y, total_weight));
  }
  // Writes this thread's sums: as the request's result if they are the `whole` of it, otherwise where the first split's partial are.
  __device__ void leave(const float4 (&value)[kFours], float2 end, bool whole) const {
    const int r = work.block_row + row;
    if (r >= work.rows) return;
    const size_t at = partial_row(work.first_split + work.split, r);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (!inside_head(i)) continue;
      if (whole) {
        put_result(r, dimension(i), value[i].x, value[i].y, end.y);
        put_result(r, dimension(i) + 2, value[i].z, value[i].w, end.y);
      } else {
        *reinterpret_cast<float4 *>(work.args.partial + at * HEAD_DIM + dimension(i)) = value[i];
      }
    }
    if (!whole && part == 0) partial_ends[at] = end;
  }
};

__device__ inline void add_weighted(float4 &to, float weight, const float4 &value) {
  to.x = fmaf(weight, value.x, to.x);
  to.y = fmaf(weight, value.y, to.y);
  to.z = fmaf(weight, value.z, to.z);
  to.w = fmaf(weight, value.w, to.w);
}

// Walks the split: the sums of weights times values go to `products`, bases and totals to `ends`.
template <int HEAD_DIM, int ROW_WARPS, class QueryChunk>
__device__ __forceinline__ void walk(const DecodeWork &work, int request, int token_warp, int first_row,
                                     const QueryChunk &query_chunk, DecodeProducts<HEAD_DIM> &products, float2 (&ends)[kWarpRows]) {
  using Products = DecodeProducts<HEAD_DIM>;
  OnlineSoftmax<Products> softmax(work, products, first_row);
  TileReader<HEAD_DIM, decode_shape(HEAD_DIM, ROW_WARPS).token_warps> reader(work, products, request, token_warp);
  uint4 k[2][Products::kKeyChunks], v[4][Products::kGroups];
  reader.load_keys(work.first_tile, k);
#pragma unroll 1
  for (int tile = work.first_tile; tile < work.last_tile; ++tile) {
    reader.load_values(tile, v);
    __syncwarp();  // or the compiler moves the loads past the products, which wait for the keys
    // After the last tile its keys are loaded again, from L1: a branch around the loads would cost as many moves.
    const int next_tile = min(tile + 1, work.last_tile - 1);
    if (next_tile > tile) reader.advance_to(next_tile);
    float score[Products::kHeldRows][Products::kHeldPositions];
    products.scores(query_chunk, k, score);
    reader.load_keys(next_tile, k);
    softmax.weigh(score, reader.position(tile), products);
    products.add(score, v);
  }
  softmax.finish(products, ends);
}

// Adds up the sums of the warps that walked other positions of the same rows, and leaves the block's result.
template <int HEAD_DIM, int ROW_WARPS, int FLOATS>
__device__ __forceinline__ void add_up_warps(
    const RowOwner<HEAD_DIM, ROW_WARPS> &owner, const DecodeProducts<HEAD_DIM> &products,
    const float2 (&ends)[ROW_WARPS][decode_shape(HEAD_DIM, ROW_WARPS).token_warps][kWarpRows],
    float (&of_warps)[decode_shape(HEAD_DIM, ROW_WARPS).threads() / 32][FLOATS]) {
  constexpr int kTokenWarps = decode_shape(HEAD_DIM, ROW_WARPS).token_warps, kStride = HEAD_DIM + kPadding;
  using Owner = RowOwner<HEAD_DIM, ROW_WARPS>;
  __syncwarp();  // before sums take the place of q
  float *const warp_sums = of_warps[threadIdx.x / 32];
  products.each([&](int row, int dimension, float2 value) {
    if (dimension < HEAD_DIM) *reinterpret_cast<float2 *>(warp_sums + row * kStride + dimension) = value;
  });
  __syncthreads();
  const int warp_of_row = owner.row / kWarpRows, row = owner.row % kWarpRows;
  float2 end = make_float2(kUnseen, 0);
  float weight[kTokenWarps];
#pragma unroll
  for (int w = 0; w < kTokenWarps; ++w) end.x = fmaxf(end.x, ends[warp_of_row][w][row].x);
#pragma unroll
  for (int w = 0; w < kTokenWarps; ++w) {
    const float2 of_warp = ends[warp_of_row][w][row];
    weight[w] = exp2_fast(of_warp.x - end.x);
    end.y = fmaf(of_warp.y, weight[w], end.y);
  }
  float4 value[Owner::kFours] = {};
#pragma unroll
  for (int w = 0; w < kTokenWarps; ++w) {
    const float *const from = of_warps[warp_of_row * kTokenWarps + w] + row * kStride;
#pragma unroll
    for (int i = 0; i < Owner::kFours; ++i) {
      if (owner.inside_head(i)) add_weighted(value[i], weight[w], *reinterpret_cast<const float4 *>(from + owner.dimension(i)));
    }
  }
  owner.leave(value, end, owner.work.count == 1);
}

// Leaves the block's result where no other warp has its rows: straight from the products' registers.
template <int HEAD_DIM, int ROW_WARPS>
__device__ __forceinline__ void leave_warp(const RowOwner<HEAD_DIM, ROW_WARPS> &owner, const DecodeProducts<HEAD_DIM> &products,
                                           int first_row, const float2 (&ends)[kWarpRows]) {
  const DecodeWork &work = owner.work;
  __syncwarp();
  products.each([&](int row, int dimension, float2 value) {
    const int r = first_row + row;
    if (dimension >= HEAD_DIM || r >= work.rows) return;
    const float2 end = ends[row];
    const size_t at = owner.partial_row(work.first_split + work.split, r);
    if (work.count == 1) {
      owner.put_result(r, dimension, value.x, value.y, end.y);
    } else {
      *reinterpret_cast<float2 *>(work.args.partial + at * HEAD_DIM + dimension) = value;
      if (dimension == 0) owner.partial_ends[at] = end;
    }
  });
}

// Waits for nobody: whether this block is the last of `members` to arrive at `arrived`, which is left as it was. Everything that the
// earlier ones wrote is visible then.
__device__ inline bool arrives_last(uint32_t *arrived, int members) {
  // Releases what the block wrote before the barrier, and acquires what the others did; the first one finds 0xFFFFFFFF.
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  const bool last = before == members - 2u;
  if (last || members == 1) *arrived = ~0u;
  return last;
}

// Adds up the splits of the request in groups of kRadix, then those sums in groups of kRadix, until one is left. The last block of each
// group to arrive does it, in the order of the splits, so results have the same bits every time.
template <int HEAD_DIM, int ROW_WARPS>
__device__ __forceinline__ void merge_splits(DecodeWork &work, const RowOwner<HEAD_DIM, ROW_WARPS> &owner,
                                             float (&weights)[decode_shape(HEAD_DIM, ROW_WARPS).rows()][kRadix], bool &last) {
  using Owner = RowOwner<HEAD_DIM, ROW_WARPS>;
  constexpr int kRowThreads = Owner::kRowThreads, kFours = Owner::kFours;
  constexpr int kAtOnce = members_at_once(kFours, decode_shape(HEAD_DIM, ROW_WARPS).token_warps == 4 && HEAD_DIM > 64 ? 32 : 16);
  uint32_t *arrivals = work.args.arrivals;
  for (int width = 1; width < work.count; width *= kRadix) {
    const int first = work.split / (width * kRadix) * (width * kRadix), members = min(kRadix, ceil_div(work.count - first, width));
    __syncthreads();
    if (threadIdx.x == 0) {
      last = arrives_last(arrivals + ((work.first_split + first) * work.args.kv_heads + work.kv_head) * gridDim.z + blockIdx.z,
                          members);
    }
    __syncthreads();
    if (!last && members > 1) return;
    arrivals += gridDim.x * work.args.kv_heads * gridDim.z;
    work.split = first;
    if (members == 1) continue;

    // Other multiprocessors wrote these, so they are not read from L1. A thread reads a few members' ends of its row, and all members'
    // sums of its dimensions.
    auto partial_of = [&](int member) {
      return owner.partial_row(work.first_split + first + member * width, min(work.block_row + owner.row, work.rows - 1));
    };
    constexpr int kEnds = kRadix / kRowThreads;
    float2 own[kEnds];
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const int member = owner.part + kRowThreads * i;
      own[i] = member < members ? __ldcg(owner.partial_ends + partial_of(member)) : make_float2(kUnseen, 0);
    }
    float4 part[kAtOnce][kFours];
    auto load = [&](int from) {
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        const float4 *const row = reinterpret_cast<const float4 *>(work.args.partial + partial_of(from + m) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          part[m][i] = from + m < members && owner.inside_head(i) ? __ldcg(row + owner.dimension(i) / 4) : make_float4(0, 0, 0, 0);
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
      weights[owner.row][owner.part + kRowThreads * i] = weight;
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
        for (int i = 0; i < kFours; ++i) add_weighted(value[i], weights[owner.row][from + m], part[m][i]);
      }
      from += kAtOnce;
      if (from >= members) break;
      load(from);
    }
    owner.leave(value, end, width * kRadix >= work.count);
  }
}

// HEAD_DIM, ROW_WARPS: decode_shape(). Grid: AttentionPlan::splits, key heads, row blocks.
template <int HEAD_DIM, int ROW_WARPS>
__global__ void __launch_bounds__(decode_shape(HEAD_DIM, ROW_WARPS).threads(),
                                  decode_shape(HEAD_DIM, ROW_WARPS).blocks_per_processor)
    attention_decode_kernel(const AttentionArgs args, int partial_rows) {
  constexpr DecodeShape kShape = decode_shape(HEAD_DIM, ROW_WARPS);
  constexpr int kTokenWarps = kShape.token_warps;
  using Products = DecodeProducts<HEAD_DIM>;
  constexpr int kKeyChunks = Products::kKeyChunks, kChunks = HEAD_DIM / 8;

  __shared__ float2 ends[ROW_WARPS][kTokenWarps][kWarpRows];  // base and total
  // Per warp: its part of q, if registers do not hold that beside keys, values and sums; later its sums.
  constexpr bool kShareQuery = HEAD_DIM > 128;
  constexpr int kQueryFloats = kShareQuery ? 128 * kKeyChunks : 0,
                kSumFloats = kTokenWarps > 1 ? kWarpRows * (HEAD_DIM + kPadding) : 0;
  constexpr int kFloats = kQueryFloats > kSumFloats ? kQueryFloats : kSumFloats;
  __shared__ __align__(16) float of_warps[ROW_WARPS * kTokenWarps][kFloats > 0 ? kFloats : 4];

  allow_next_launch();
  const Splits splits(args, kShape.tile(), gridDim.x);
  int first_split;
  const int request = find_request(args.requests, blockIdx.x, first_split, [&](int b) { return splits.splits(b); });
  if (request < 0) return;
  const Query query(args, request);
  const int heads = args.q_heads / args.kv_heads, kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, token_warp = warp % kTokenWarps, row_warp = warp / kTokenWarps;
  const int block_row = blockIdx.z * kShape.rows(), first_row = block_row + kWarpRows * row_warp, rows = query.count * heads;
  if (block_row >= rows) return;

  // This block's split: tiles in equal shares, so that a request's last split is not a stub.
  const int begin = splits.begin(query), tiles = ceil_div(query.length - begin, kShape.tile()), count = splits.splits_of(tiles);
  const int split = blockIdx.x - first_split;
  DecodeWork work{
      args, query, kv_head, heads, block_row, rows, first_split, count, begin, split * tiles / count, (split + 1) * tiles / count,
      split};

  Products products(threadIdx.x % 32);
  uint4 q[kKeyChunks];
  {
    const int row = first_row + products.query_row();
    const __half *const of_head =
        args.q + static_cast<size_t>(query.first + work.token(row)) * args.q_stride + work.head(row) * HEAD_DIM;
    const uint4 *const from = reinterpret_cast<const uint4 *>(of_head);
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      const int chunk = products.key_chunk() + 4 * j;
      q[j] = row < rows && chunk < kChunks ? from[chunk] : make_uint4(0, 0, 0, 0);
      if (kShareQuery) reinterpret_cast<uint4 *>(of_warps[warp])[32 * j + products.lane] = q[j];
    }
  }
  auto query_chunk = [&](int j) {
    return kShareQuery ? reinterpret_cast<const uint4 *>(of_warps[warp])[32 * j + products.lane] : q[j];
  };
  walk<HEAD_DIM, ROW_WARPS>(work, request, token_warp, first_row, query_chunk, products, ends[row_warp][token_warp]);

  const RowOwner<HEAD_DIM, ROW_WARPS> owner(work, partial_rows);
  if constexpr (kTokenWarps > 1) {
    add_up_warps(owner, products, ends, of_warps);
  } else {
    leave_warp(owner, products, first_row, ends[row_warp][0]);
  }
  if (count == 1) return;
  __shared__ float weights[kShape.rows()][kRadix];
  __shared__ bool last;
  merge_splits(work, owner, weights, last);
}

}  // namespace voltserve
