// y[t][n] = row_factor[n] * sum_k x[t][k] * e2m1(code[n][k]) * e4m3(scale[n][k / group]) + bias[n], straight from the packed
// weights (layout.cuh): the skeleton shared by CUDA cores (linear_fma.cuh) and tensor cores (linear_mma.cuh).
//
// x fp16 [M, K], rows 16-byte aligned; y fp16 [M, N]; sums in fp32 throughout, so nothing overflows before the last rounding
// to fp16, whatever x is. Partial sums are added in a fixed order: the same bits on every run.
//
// An output tile is WM*Math::kTokens tokens by WN*Math::kRowTiles*32 rows. Its WM*WN*WK warps walk K in stages of WK tiles of
// 64 columns: warp (wm, wn, wk) multiplies tile wk of the stage. The stage's activations are in shared memory,
// double-buffered; weights go from global memory to the registers of the one lane that uses them, each register refilled
// for the next stage as soon as it is used, and never touch shared memory.
//
// All (tile, stage) pairs in a row are cut into one equal run for each block of the grid, so that every multiprocessor gets the same
// work whatever N is (the stream-K decomposition, Osama et al., arXiv 2301.03598). A tile that one block finishes is
// written at once; of a tile shared by several, each leaves its sums in the workspace, and the last to come adds them up.
//
// Grouped (mixture of experts): token block b uses expert experts[b]'s weights, and its slot s holds the token
// slots[b*tokens + s] / top_k (vLLM's moe_align_block_size); y has one row a slot id, [M * top_k, N].
#pragma once

#include "layout.cuh"
#include "linear.h"

namespace voltserve {

template <class Math, int WM_, int WN_, int WK_, int GROUP_>
struct Tile {
  static constexpr int kWM = WM_, kWN = WN_, kWK = WK_, kGroup = GROUP_;
  static constexpr int kThreads = 32 * WM_ * WN_ * WK_;
  static constexpr int kTokens = WM_ * Math::kTokens;
  static constexpr int kRows = WN_ * Math::kRowTiles * kTileRows;
  static constexpr int kElements = kTokens * kRows;
  static constexpr int kStageColumns = WK_ * kTileColumns;
  // One 16-byte chunk more than the columns: eight tokens' equal columns then lie in different banks.
  static constexpr int kStride = kStageColumns + 16 / static_cast<int>(sizeof(typename Math::X));
  static constexpr int kBufferElements = kTokens * kStride;
  static constexpr int kBufferBytes = kBufferElements * static_cast<int>(sizeof(typename Math::X));
  static constexpr int kPartTokens = WM_ * Math::kPartTokens;
  static constexpr int kPartElements = kPartTokens * kRows;
  static constexpr int kReduceBytes = WK_ * kPartElements * 4;
  static constexpr int kSharedBytes = 2 * kBufferBytes > kReduceBytes ? 2 * kBufferBytes : kReduceBytes;
};

// The work of the grid: tiles in order (rows fastest), stages in each, and the run of them that a block takes: `share` each,
// the first `extra` blocks one more.
struct Work {
  unsigned row_blocks, stages, share, extra;

  __device__ unsigned begin(unsigned block) const { return block * share + min(block, extra); }
  // The block whose run holds (tile, stage) number `unit`.
  __device__ unsigned owner(unsigned unit) const {
    const unsigned longer = extra * (share + 1);
    return unit < longer ? unit / (share + 1) : extra + (unit - longer) / share;
  }
};

// One output tile: how its tokens map to rows of x and y.
template <class T, bool GROUPED>
struct Target {
  const LinearArgs &args;
  int first_token, first_row, expert = 0;

  __device__ Target(const LinearArgs &a, const Work &work, unsigned tile) : args(a) {
    const unsigned token_block = tile / work.row_blocks;
    first_token = token_block * T::kTokens;
    first_row = (tile - token_block * work.row_blocks) * T::kRows;
    if constexpr (GROUPED) expert = __ldg(a.experts + token_block);
  }
  // The row of y (and, divided by top_k, of x) of token `t` of the tile; -1 where there is none.
  __device__ int slot(int t) const {
    if constexpr (GROUPED) {
      const int id = __ldg(args.slots + first_token + t);
      return id < args.m * args.top_k ? id : -1;
    } else {
      return first_token + t < args.m ? first_token + t : -1;
    }
  }
  __device__ int x_row(int slot) const { return GROUPED ? slot / args.top_k : slot; }
};

// Activations of one stage: global memory to registers (fetch), later to shared memory (store). A thread keeps one column of
// 8 halves and every kTokenStep-th token.
template <class Math, class T, bool GROUPED>
struct Stager {
  static constexpr int kChunksPerToken = T::kStageColumns / 8;
  static constexpr int kTokenStep = T::kThreads / kChunksPerToken;
  static constexpr int kChunks = ceil_div(T::kTokens, kTokenStep);
  static_assert(T::kThreads % kChunksPerToken == 0);

  const half *x;
  int column, first_token;
  int offset[kChunks];  // of the token's row of x in elements; -1 where there is no token
  uint4 held[kChunks];

  __device__ explicit Stager(const Target<T, GROUPED> &target) : x(target.args.x) {
    column = threadIdx.x % kChunksPerToken * 8;
    first_token = threadIdx.x / kChunksPerToken;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int token = first_token + i * kTokenStep;
      const int slot = token < T::kTokens ? target.slot(token) : -1;
      offset[i] = slot < 0 ? -1 : target.x_row(slot) * target.args.x_stride;
    }
  }
  __device__ void fetch(int stage, int columns) {
    const int k = stage * T::kStageColumns + column;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      held[i] = make_uint4(0, 0, 0, 0);
      if (offset[i] >= 0 && k < columns) {  // K is a multiple of 16: a chunk is inside or outside as a whole
        held[i] = __ldg(reinterpret_cast<const uint4 *>(x + offset[i] + k));
      }
    }
  }
  __device__ void store(typename Math::X *shared) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int token = first_token + i * kTokenStep;
      if (T::kTokens % kTokenStep == 0 || token < T::kTokens) Math::store_x(shared + token * T::kStride + column, held[i]);
    }
  }
};

// Adds what the blocks that share the tile computed and writes y. `each(visit)` calls visit(token, row, value) for the
// elements the calling thread owns, the same ones in the same order every time.
template <class Math, class T, bool GROUPED, class Each>
__device__ void write(const Target<T, GROUPED> &target, const Work &work, unsigned tile, Each each) {
  const LinearArgs &args = target.args;
  auto store = [&](int token, int row, float sum) {
    const int slot = target.slot(token), n = target.first_row + row;
    if (slot < 0 || n >= args.n) return;
    const float factor = __ldg(args.row_factor + static_cast<size_t>(target.expert) * args.n + n) * Math::kFactor;
    const float y = args.bias == nullptr ? sum * factor : fmaf(sum, factor, __half2float(__ldg(args.bias + n)));
    args.y[static_cast<size_t>(slot) * args.n + n] = __float2half_rn(y);
  };
  const unsigned first = work.owner(tile * work.stages), last = work.owner(tile * work.stages + work.stages - 1);
  if (first == last) {
    each(store);
    return;
  }
  // A block has at most two tiles that it shares: the one its run begins in (0), and the one it ends in (1).
  auto slice = [&](unsigned block) {
    const bool second = block == first && work.begin(block) < tile * work.stages;
    return args.workspace + static_cast<size_t>(2 * block + second) * T::kElements;
  };
  float *const mine = slice(blockIdx.x);
  each([&](int token, int row, float sum) { mine[token * T::kRows + row] = sum; });
  __threadfence();
  __shared__ bool is_last;
  __syncthreads();
  // The counter wraps to 0 by itself, ready for the next launch.
  if (threadIdx.x == 0) is_last = atomicInc(args.counters + tile, last - first) == last - first;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // Loads of several slices at once: one after the other, their latency would be most of a small product's time.
  constexpr int kAtOnce = 8;
  for (int i = 4 * threadIdx.x; i < T::kElements; i += 4 * T::kThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (unsigned block = first; block <= last; block += kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        parts[s] = make_float4(0, 0, 0, 0);
        if (block + s <= last) parts[s] = __ldcg(reinterpret_cast<const float4 *>(slice(block + s) + i));
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        sum.x += parts[s].x;
        sum.y += parts[s].y;
        sum.z += parts[s].z;
        sum.w += parts[s].w;
      }
    }
    const int token = i / T::kRows, row = i % T::kRows;
    store(token, row, sum.x);
    store(token, row + 1, sum.y);
    store(token, row + 2, sum.z);
    store(token, row + 3, sum.w);
  }
}

// Refills a lane's weight registers for the next stage, once multiply() has used them.
template <class Weights, int ROW_TILES>
struct Reload {
  Weights (&tiles)[ROW_TILES];
  const typename Weights::Source (&sources)[ROW_TILES];
  const bool (&inside)[ROW_TILES];

  __device__ void scales(int r) const { tiles[r].load_scales(sources[r], inside[r]); }
  __device__ void half(int r, int h) const { tiles[r].load_half(sources[r], h, inside[r]); }
};

template <class Math, class T, int MIN_BLOCKS, bool GROUPED>
__global__ void __launch_bounds__(T::kThreads, MIN_BLOCKS) linear_kernel(const LinearArgs args) {
  using X = typename Math::X;
  using Weights = typename Math::template Weights<T::kGroup>;
  constexpr int kRowTiles = Math::kRowTiles;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  X *const shared_x = reinterpret_cast<X *>(shared_bytes);

  const int column_tiles = ceil_div(args.k, kTileColumns), tile_rows = ceil_div(args.n, kTileRows);
  const int token_blocks = (GROUPED ? *args.padded_slots : args.m + T::kTokens - 1) / T::kTokens;
  Work work;
  work.row_blocks = ceil_div(args.n, T::kRows);
  work.stages = ceil_div(column_tiles, T::kWK);
  const unsigned total = work.row_blocks * token_blocks * work.stages;
  work.share = total / gridDim.x;
  work.extra = total - work.share * gridDim.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wk = warp % T::kWK, wn = warp / T::kWK % T::kWN, wm = warp / (T::kWK * T::kWN);

  const unsigned run_end = work.begin(blockIdx.x + 1);
  for (unsigned unit = work.begin(blockIdx.x); unit < run_end;) {
    const unsigned tile = unit / work.stages;
    const int begin = unit - tile * work.stages, end = min(work.stages, begin + run_end - unit);
    unit += end - begin;
    const Target<T, GROUPED> target(args, work, tile);

    Weights weights[kRowTiles];
    typename Weights::Source sources[kRowTiles];
    bool inside[kRowTiles], row_inside[kRowTiles];
    const Reload<Weights, kRowTiles> reload{weights, sources, inside};
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int tile_row = target.first_row / kTileRows + wn * kRowTiles + r;
      const size_t row = static_cast<size_t>(target.expert) * tile_rows + tile_row;
      sources[r].seek(args.codes, args.scales, row * column_tiles + begin * T::kWK + wk, lane);
      row_inside[r] = tile_row < tile_rows;
      inside[r] = row_inside[r] && begin * T::kWK + wk < column_tiles;
      reload.scales(r);
#pragma unroll
      for (int h = 0; h < Weights::kHalves; ++h) reload.half(r, h);
    }
    Stager<Math, T, GROUPED> stager(target);
    stager.fetch(begin, args.k);
    stager.store(shared_x);
    __syncthreads();

    Math math;
    int buffer = 0;
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      const int next = stage + 1;
      const bool more = next < end;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        sources[r].step(T::kWK);
        inside[r] = more && row_inside[r] && next * T::kWK + wk < column_tiles;
      }
      if (more) stager.fetch(next, args.k);
      math.template multiply<T::kGroup, T::kStride>(
          shared_x + buffer + wm * Math::kTokens * T::kStride + wk * kTileColumns, weights, lane, reload);
      buffer = T::kBufferElements - buffer;
      if (more) stager.store(shared_x + buffer);
      __syncthreads();
    }

    // A few tokens at a time go through shared memory, where the WK warps' sums meet and rows lie side by side.
    float *const sums = reinterpret_cast<float *>(shared_bytes);
    write<Math, T>(target, work, tile, [&](auto visit) {
#pragma unroll
      for (int part = 0; part < Math::kParts; ++part) {
        math.part(part, lane, [&](int token, int row, float value) {
          const int t = wm * Math::kPartTokens + token, n = wn * kRowTiles * kTileRows + row;
          sums[(wk * T::kPartTokens + t) * T::kRows + n] = value;
        });
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < T::kPartElements; i += T::kThreads) {
          float sum = sums[i];
#pragma unroll
          for (int w = 1; w < T::kWK; ++w) sum += sums[w * T::kPartElements + i];
          const int t = i / T::kRows;
          visit(t / Math::kPartTokens * Math::kTokens + part * Math::kPartTokens + t % Math::kPartTokens, i % T::kRows, sum);
        }
        __syncthreads();
      }
    });
  }
}

}  // namespace voltserve
