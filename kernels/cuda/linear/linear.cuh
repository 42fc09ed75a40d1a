// The fused linear layer: NVFP4 or FP8 weights are expanded inside the GEMM.
//
//     y[t][n] = row_factor[n] * sum_k x[t][k] * e2m1(code[n][k]) * e4m3(scale[n][k / group]) + bias[n]
//
//     x        fp16 [M, K], rows 16-byte aligned          y   fp16 [M, N]
//     weights  packed (common/layout.cuh, layout8.cuh)    sums in fp32, rounded to fp16 once, so nothing overflows before
//
// This file is the skeleton around the multiplication on tensor cores (mma.cuh): staging, prefetch, split of work, final sums.
// Partial sums are added in a fixed order, so a call gives the same bits every time.
//
// A block computes an output tile of WM * Math::kTokens tokens by WN * Math::kRowTiles * 32 rows of W. Its WM * WN * WK warps walk K
// in stages of WK tiles of 64 columns; warp (wm, wn, wk) multiplies tile wk of each stage:
//
//                       K: stage 0                    stage 1
//                    +----------+----------+     +----------+----------+
//     W rows, wn = 0 |  wk = 0  |  wk = 1  |     |  wk = 0  |  wk = 1  |  ...
//                    +----------+----------+     +----------+----------+
//     W rows, wn = 1 |  wk = 0  |  wk = 1  |     |  wk = 0  |  wk = 1  |  ...
//                    +----------+----------+     +----------+----------+
//
// Activations are double-buffered in shared memory, several stages per buffer where tokens are few. Weights never touch shared
// memory. They go to the registers of the one lane that uses them. Each register is refilled for the next stage right after its
// use.
//
// Split of work: stream-K (Osama et al., arXiv 2301.03598). All (tile, stage) pairs in order are cut into equal ranges, one per
// block, so every multiprocessor gets the same work whatever N is:
//
//     tile      0 0 0 0 0 | 1 1 1 1 1 | 2 2 2 2 2        3 tiles of 5 stages, 4 blocks
//     block     a a a a b | b b b c c | c c d d d
//
// A tile within one range is written at once. Of a shared tile each block leaves its sums in the workspace, and the tile's last
// block adds them up in order.
//
// Bytes: the weights once, N * K * (1/2 + 1/group); activations come from L2 once per 64 rows of weights. Fraction of the read
// ceiling at M = 1, measured on an H200 on 2026-11-30: 26-74 % by layer. A kernel that only reads as many bytes reaches 48-90 %
// (docs/results/cuda-h200-time-2026-11-30.json). Computed for a V100 PCIe: 84 % over Qwen3-32B's layers at TP2.
//
// Grouped (mixture of experts): block b of tokens uses the weights of expert experts[b]. Its slot s holds token
// slots[b * tokens + s] / top_k, as vLLM's moe_align_block_size lays them out. y has one row per slot, [M * top_k, N].
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/divisor.cuh"
#include "cuda/common/layout.cuh"
#include "cuda/linear/args.h"
#include "cuda/common/mailbox.cuh"

namespace voltserve {

template <class Math, int WM_, int WN_, int WK_, int GROUP_>
struct Tile {
  static constexpr int kWM = WM_, kWN = WN_, kWK = WK_, kGroup = GROUP_;
  static constexpr int kThreads = 32 * WM_ * WN_ * WK_;
  static constexpr int kTokens = WM_ * Math::kTokens;
  static constexpr int kRows = WN_ * Math::kRowTiles * kTileRows;
  static constexpr int kElements = kTokens * kRows;
  static constexpr int kStageColumns = WK_ * kTileColumns;
  // A buffer holds several stages where tokens are few, so that the block meets at a barrier less often.
  static constexpr int kBufferStages = Math::kTokens <= 4 ? 4 : Math::kTokens <= 8 ? 2 : 1;
  static constexpr int kBufferColumns = kBufferStages * kStageColumns;
  // Padded by one 16-byte chunk, so that the same column of eight tokens lies in different banks.
  static constexpr int kStride = kBufferColumns + 8;
  static constexpr int kBufferElements = kTokens * kStride;
  static constexpr int kBufferBytes = kBufferElements * 2;
  static constexpr int kPartTokens = WM_ * Math::kPartTokens;
  static constexpr int kPartElements = kPartTokens * kRows;
  static constexpr int kReduceBytes = WK_ * kPartElements * 4;
  static constexpr int kSharedBytes = 2 * kBufferBytes > kReduceBytes ? 2 * kBufferBytes : kReduceBytes;
};

// The (tile, stage) pairs of the grid in order, rows fastest, and the range of them per block: `share` pairs, and one more for each
// of the first `extra` blocks.
struct Work {
  Divisor row_blocks, stages, share, longer_share;
  unsigned extra;

  Work() = default;
  VOLTSERVE_BOTH Work(int n, int k, int rows, int stage_tiles, unsigned token_blocks, unsigned blocks)
      : row_blocks(ceil_div(n, rows)), stages(ceil_div(ceil_div(k, kTileColumns), stage_tiles)) {
    const unsigned total = row_blocks.value * token_blocks * stages.value;
    share = Divisor(total / blocks);
    longer_share = Divisor(share.value + 1);
    extra = total - share.value * blocks;
  }
  __device__ unsigned begin(unsigned block) const { return block * share.value + min(block, extra); }
  // The block whose range holds pair number `pair`.
  __device__ unsigned owner(unsigned pair) const {
    const unsigned longer = extra * longer_share.value;
    return pair < longer ? pair / longer_share : extra + (pair - longer) / share;
  }
};

// One output tile, and which rows of x and y its tokens are.
template <class T, bool GROUPED>
struct Target {
  const LinearArgs &args;
  int first_token, first_row, expert = 0;

  __device__ Target(const LinearArgs &a, const Work &work, unsigned tile) : args(a) {
    const unsigned token_block = tile / work.row_blocks;
    first_token = token_block * T::kTokens;
    first_row = (tile - token_block * work.row_blocks.value) * T::kRows;
    if constexpr (GROUPED) expert = __ldg(a.experts + token_block);
  }
  // The row of y for token `t` of the tile, or -1 past the last token.
  __device__ int slot(int t) const {
    if constexpr (GROUPED) {
      const int id = __ldg(args.slots + first_token + t);
      return id < args.m * args.top_k ? id : -1;
    } else {
      return first_token + t < args.m ? first_token + t : -1;
    }
  }
  // The row of x for token `t`; any valid row past the last token.
  __device__ int x_row(int t) const {
    if constexpr (GROUPED) {
      return max(slot(t), 0) / args.top_k;
    } else {
      return min(first_token + t, args.m - 1);
    }
  }
};

// Stands in for columns of x past K.
__device__ constexpr uint4 kZeros = {0, 0, 0, 0};

// Copies activations of one buffer from global memory to registers (fetch), and later to shared memory (store). A thread copies
// chunks of 8 halves of every kTokenStep-th token.
template <class T, bool GROUPED>
struct Stager {
  static constexpr int kChunks = T::kBufferColumns / 8;  // per token
  static constexpr int kTokenStep = T::kThreads / kChunks;
  static constexpr int kRounds = T::kTokens / kTokenStep;
  static_assert(T::kThreads % kChunks == 0 && T::kTokens % kTokenStep == 0);

  const half *x;
  int column, first_token;
  unsigned offset[kRounds];  // of each token's row of x, in elements
  uint4 held[kRounds];

  __device__ explicit Stager(const Target<T, GROUPED> &target) : x(target.args.x) {
    column = threadIdx.x % kChunks * 8;
    first_token = threadIdx.x / kChunks;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      offset[i] = target.x_row(first_token + i * kTokenStep) * target.args.x_stride;
      if (T::kBufferStages == 1) asm volatile("" : "+r"(offset[i]));  // used in every stage, so keep it in a register
    }
  }
  // K is a multiple of 16, so a chunk is inside or outside as a whole.
  __device__ void fetch(int stage, int columns) {
    const int k = stage * T::kStageColumns + column;
    const bool inside = k < columns;
    const char *const from = reinterpret_cast<const char *>(inside ? x + k : reinterpret_cast<const half *>(&kZeros));
    const unsigned element = inside ? sizeof(half) : 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      held[i] = load_written(reinterpret_cast<const uint4 *>(from + static_cast<uint64_t>(offset[i]) * element));
    }
  }
  __device__ void store(half *shared) const {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      *reinterpret_cast<uint4 *>(shared + (first_token + i * kTokenStep) * T::kStride + column) = held[i];
    }
  }
};

// Row factors and biases of the tile, read along with the weights rather than once the sums are ready.
template <class T>
struct RowEnds {
  float factor[T::kRows], bias[T::kRows];

  __device__ void fetch(const LinearArgs &args, int expert, int first_row) {
    static_assert(T::kRows <= T::kThreads);
    const int row = threadIdx.x, n = first_row + row;
    if (row >= T::kRows) return;
    const bool inside = n < args.n;
    factor[row] = inside ? __ldg(args.row_factor + static_cast<size_t>(expert) * args.n + n) * kProductFactor : 0;
    bias[row] = inside && args.bias != nullptr ? __half2float(__ldg(args.bias + n)) : 0;
  }
};

// Writes y, after adding the sums of all blocks that share the tile. `each(visit)` calls visit(token, row, value) for the elements
// that the calling thread owns, in the same order every time. The tile's last block waits for the others (common/mailbox.cuh).
template <class T, bool GROUPED, class Each>
__device__ void write(const Target<T, GROUPED> &target, const Work &work, unsigned tile, const RowEnds<T> &ends, Each each) {
  const LinearArgs &args = target.args;
  auto store = [&](int token, int row, float sum) {
    const int slot = target.slot(token), n = target.first_row + row;
    if (slot < 0 || n >= args.n) return;
    args.y[static_cast<size_t>(slot) * args.n + n] = __float2half_rn(fmaf(sum, ends.factor[row], ends.bias[row]));
  };
  const unsigned first = work.owner(tile * work.stages.value), last = work.owner(tile * work.stages.value + work.stages.value - 1);
  if (first == last) {
    each(store);
    return;
  }
  // A block shares at most two tiles: the one in which its range begins (slice 0), and the one in which it ends (slice 1).
  auto slice = [&](unsigned block) {
    const bool second = block == first && work.begin(block) < tile * work.stages.value;
    return reinterpret_cast<float *>(args.workspace) + static_cast<size_t>(2 * block + second) * T::kElements;
  };
  float *const mine = slice(blockIdx.x);
  each([&](int token, int row, float sum) { __stcg(mine + token * T::kRows + row, sum); });
  if (blockIdx.x != last) return;
  // Slices are loaded eight at a time. One after another, their latency would dominate a small GEMM.
  constexpr int kAtOnce = 8;
  for (int i = 4 * threadIdx.x; i < T::kElements; i += 4 * T::kThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
    auto four_of = [&](unsigned block) { return reinterpret_cast<float4 *>(slice(block) + i); };
    for (unsigned block = first; block <= last; block += kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        parts[s] = make_float4(0, 0, 0, 0);
        if (block + s <= last) parts[s] = load_now(four_of(block + s));
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        while (!has_arrived(parts[s])) parts[s] = load_now(four_of(block + s));
        if (block + s <= last) clear(four_of(block + s));
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

// Refills a lane's weight registers for the next stage once multiply() has used them. There are weights before stage `limit`.
template <class Weights, int ROW_TILES>
struct Reload {
  Weights (&tiles)[ROW_TILES];
  const typename Weights::Source (&sources)[ROW_TILES];
  const int &limit, &stage;

  __device__ void scales(int r) const { tiles[r].load_scales(sources[r], stage < limit); }
  __device__ void part(int r, int p) const { tiles[r].load_part(sources[r], p, stage < limit); }
};

template <class Math, class T, int MIN_BLOCKS, bool GROUPED>
__global__ void __launch_bounds__(T::kThreads, MIN_BLOCKS) linear_kernel(const LinearArgs args, const Work known) {
  using Weights = typename Math::template Weights<T::kGroup>;
  constexpr int kRowTiles = Math::kRowTiles;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  half *const shared_x = reinterpret_cast<half *>(shared_bytes);
  __shared__ RowEnds<T> ends;

  const int column_tiles = ceil_div(args.k, kTileColumns), tile_rows = ceil_div(args.n, kTileRows);
  // As a dependent launch the kernel loads its first weights while the kernel in front still runs. Grouped calls do not: their
  // routing is written too shortly before.
  [[maybe_unused]] bool first_tile = true;
  if constexpr (!GROUPED) allow_next_launch();
  // Only the GPU knows how many slots the experts have.
  __shared__ Work counted;
  if constexpr (GROUPED) {
    if (threadIdx.x == 0) counted = Work(args.n, args.k, T::kRows, T::kWK, *args.padded_slots / T::kTokens, gridDim.x);
    __syncthreads();
  }
  const Work &work = GROUPED ? counted : known;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wk = warp % T::kWK, wn = warp / T::kWK % T::kWN, wm = warp / (T::kWK * T::kWN);

  // A range is walked backwards. Its last tile, whose sums others wait for, comes first; its first tile, for which this block
  // waits, comes last.
  const unsigned range_begin = work.begin(blockIdx.x);
  for (unsigned range_end = work.begin(blockIdx.x + 1); range_end > range_begin;) {
    const unsigned tile = (range_end - 1) / work.stages;
    const int end = range_end - tile * work.stages.value;
    range_end = max(range_begin, tile * work.stages.value);
    const int begin = range_end - tile * work.stages.value;
    const Target<T, GROUPED> target(args, work, tile);

    Weights weights[kRowTiles];
    typename Weights::Source sources[kRowTiles];
    const int limit = T::kWK == 1 ? end : min(end, (column_tiles - wk + T::kWK - 1) / T::kWK);
    int stage = begin;
    const Reload<Weights, kRowTiles> reload{weights, sources, limit, stage};
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      // Past the last row of tiles that row is read again, and its sums are not written.
      const int tile_row = min(target.first_row / kTileRows + wn * kRowTiles + r, tile_rows - 1);
      const unsigned row = static_cast<unsigned>(target.expert) * tile_rows + tile_row;
      sources[r].seek(args.codes, args.scales, row * column_tiles + begin * T::kWK + wk, lane);
      reload.scales(r);
#pragma unroll
      for (int p = 0; p < Weights::kParts; ++p) reload.part(r, p);
    }
    if constexpr (kDependentLaunch && !GROUPED) {
      if (first_tile) {
        uint32_t seen = 0;
#pragma unroll
        for (const Weights &tile_weights : weights) seen ^= tile_weights.all_bits();
        await(seen);
        wait_for_previous();
      }
      first_tile = false;
    }
    Stager<T, GROUPED> stager(target);
    stager.fetch(begin, args.k);
    ends.fetch(args, target.expert, target.first_row);
    stager.store(shared_x);
    __syncthreads();

    Math math;
    int buffer = 0, lane_offset = (wm * Math::kTokens + Math::token(lane)) * T::kStride + wk * kTileColumns;
    // One register where stages are short; otherwise the compiler adds the terms again in every stage.
    if (T::kBufferStages > 1) asm volatile("" : "+r"(lane_offset));
#pragma unroll 1
    while (stage < end) {
      const int next_buffer = stage + T::kBufferStages;
      int stages = min(T::kBufferStages, end - stage);
      if (next_buffer < end) stager.fetch(next_buffer, args.k);
      const half *x = shared_x + buffer + lane_offset;
#pragma unroll 1
      do {
        ++stage;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) sources[r].template step<T::kWK>();
        math.template multiply<T::kGroup, T::kStride>(x, weights, lane, reload);
        x += T::kStageColumns;
      } while (T::kBufferStages > 1 && --stages);
      buffer = T::kBufferElements - buffer;
      if (next_buffer < end) stager.store(shared_x + buffer);
      __syncthreads();
    }

    // Sums go through shared memory a few tokens at a time: there the WK warps' sums are added, and rows lie side by side.
    float *const sums = reinterpret_cast<float *>(shared_bytes);
    write<T>(target, work, tile, ends, [&](auto visit) {
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
