// y[t][n] = row_factor[n] * sum_k x[t][k] * e2m1(code[n][k]) * e4m3(scale[n][k / group]) + bias[n], straight from the packed
// weights (common/layout.cuh): the skeleton around the multiplication on tensor cores (mma.cuh).
//
// x fp16 [M, K], rows 16-byte aligned; y fp16 [M, N]; sums in fp32 throughout, so nothing overflows before the last rounding
// to fp16, whatever x is. Partial sums are added in a fixed order: the same bits on every run.
//
// An output tile is WM*Math::kTokens tokens by WN*Math::kRowTiles*32 rows. Its WM*WN*WK warps walk K in stages of WK tiles of
// 64 columns: warp (wm, wn, wk) multiplies tile wk of the stage. Activations are in shared memory, double-buffered, several
// stages at a time where tokens are few; weights go from global memory to the registers of the one lane that uses them, each
// register refilled for the next stage as soon as it is used, and never touch shared memory.
//
// All (tile, stage) pairs in a row are cut into one equal run for each block of the grid, so that every multiprocessor gets the same
// work whatever N is (the stream-K decomposition, Osama et al., arXiv 2301.03598). A tile that one block finishes is
// written at once; of a tile shared by several, each leaves its sums in the workspace, and the last block adds them up.
//
// Bytes: the weights once, N * K * (1/2 + 1/group); for each 64 rows of them the tokens' activations, from the L2. Of the read
// ceiling an H200 reaches 26-74 % at M = 1, by layer, where a kernel that only reads as much reaches 48-90 % (2026-11-30, measured,
// docs/results/cuda-h200-time-2026-11-30.json); a V100 PCIe, computed, 84 % over Qwen3-32B's layers at TP2.
//
// Grouped (mixture of experts): token block b uses expert experts[b]'s weights, and its slot s holds the token
// slots[b*tokens + s] / top_k (vLLM's moe_align_block_size); y has one row a slot id, [M * top_k, N].
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
  // Columns of activations in a buffer: those of several stages where tokens are few, so that warps wait for each other seldom.
  static constexpr int kBufferStages = Math::kTokens <= 4 ? 4 : Math::kTokens <= 8 ? 2 : 1;
  static constexpr int kBufferColumns = kBufferStages * kStageColumns;
  // One 16-byte chunk more than the columns: eight tokens' equal columns then lie in different banks.
  static constexpr int kStride = kBufferColumns + 8;
  static constexpr int kBufferElements = kTokens * kStride;
  static constexpr int kBufferBytes = kBufferElements * 2;
  static constexpr int kPartTokens = WM_ * Math::kPartTokens;
  static constexpr int kPartElements = kPartTokens * kRows;
  static constexpr int kReduceBytes = WK_ * kPartElements * 4;
  static constexpr int kSharedBytes = 2 * kBufferBytes > kReduceBytes ? 2 * kBufferBytes : kReduceBytes;
};

// The work of the grid: tiles in order (rows fastest), stages in each, and the run of them that a block takes: `share` each,
// the first `extra` blocks one more.
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
  // The block whose run holds (tile, stage) number `unit`.
  __device__ unsigned owner(unsigned unit) const {
    const unsigned longer = extra * longer_share.value;
    return unit < longer ? unit / longer_share : extra + (unit - longer) / share;
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
    first_row = (tile - token_block * work.row_blocks.value) * T::kRows;
    if constexpr (GROUPED) expert = __ldg(a.experts + token_block);
  }
  // The row of y of token `t` of the tile; -1 where there is none.
  __device__ int slot(int t) const {
    if constexpr (GROUPED) {
      const int id = __ldg(args.slots + first_token + t);
      return id < args.m * args.top_k ? id : -1;
    } else {
      return first_token + t < args.m ? first_token + t : -1;
    }
  }
  // The row of x of token `t`; some row where there is no such token.
  __device__ int x_row(int t) const {
    if constexpr (GROUPED) {
      return max(slot(t), 0) / args.top_k;
    } else {
      return min(first_token + t, args.m - 1);
    }
  }
};

// What lies right of x for the kernels.
__device__ constexpr uint4 kZeros = {0, 0, 0, 0};

// Activations of one buffer: global memory to registers (fetch), later to shared memory (store). A thread takes chunks of 8
// halves of every kTokenStep-th token.
template <class T, bool GROUPED>
struct Stager {
  static constexpr int kChunks = T::kBufferColumns / 8;  // of a token
  static constexpr int kTokenStep = T::kThreads / kChunks;
  static constexpr int kRounds = T::kTokens / kTokenStep;
  static_assert(T::kThreads % kChunks == 0 && T::kTokens % kTokenStep == 0);

  const half *x;
  int column, first_token;
  unsigned offset[kRounds];  // of the token's row of x, in elements
  uint4 held[kRounds];

  __device__ explicit Stager(const Target<T, GROUPED> &target) : x(target.args.x) {
    column = threadIdx.x % kChunks * 8;
    first_token = threadIdx.x / kChunks;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      offset[i] = target.x_row(first_token + i * kTokenStep) * target.args.x_stride;
      if (T::kBufferStages == 1) asm volatile("" : "+r"(offset[i]));  // fetched in every stage: not to be computed in each
    }
  }
  // K is a multiple of 16: a chunk is inside or outside as a whole.
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

// What a row's sum is multiplied by, and what is added: read while the weights are, not when the sum is ready.
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

// Adds what the blocks that share the tile computed and writes y. `each(visit)` calls visit(token, row, value) for the
// elements the calling thread owns, the same ones in the same order every time.
//
// A tile's last block waits for the others' sums (common/mailbox.cuh).
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
  // A block has at most two tiles that it shares: the one its run begins in (0), and the one it ends in (1).
  auto slice = [&](unsigned block) {
    const bool second = block == first && work.begin(block) < tile * work.stages.value;
    return reinterpret_cast<float *>(args.workspace) + static_cast<size_t>(2 * block + second) * T::kElements;
  };
  float *const mine = slice(blockIdx.x);
  each([&](int token, int row, float sum) { __stcg(mine + token * T::kRows + row, sum); });
  if (blockIdx.x != last) return;
  // Loads of several slices at once: one after the other, their latency would be most of a small product's time.
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
        while (!has_come(parts[s])) parts[s] = load_now(four_of(block + s));
        if (block + s <= last) renew(four_of(block + s));
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

// Refills a lane's weight registers for the next stage, once multiply() has used them. Before stage `limit` there are weights.
template <class Weights, int ROW_TILES>
struct Reload {
  Weights (&tiles)[ROW_TILES];
  const typename Weights::Source (&sources)[ROW_TILES];
  const int &limit, &stage;

  __device__ void scales(int r) const { tiles[r].load_scales(sources[r], stage < limit); }
  __device__ void half(int r, int h) const { tiles[r].load_half(sources[r], h, stage < limit); }
};

template <class Math, class T, int MIN_BLOCKS, bool GROUPED>
__global__ void __launch_bounds__(T::kThreads, MIN_BLOCKS) linear_kernel(const LinearArgs args, const Work known) {
  using Weights = typename Math::template Weights<T::kGroup>;
  constexpr int kRowTiles = Math::kRowTiles;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  half *const shared_x = reinterpret_cast<half *>(shared_bytes);
  __shared__ RowEnds<T> ends;

  const int column_tiles = ceil_div(args.k, kTileColumns), tile_rows = ceil_div(args.n, kTileRows);
  // Products start early, and have their first weights when the activations come. Experts' routing comes too shortly before them.
  [[maybe_unused]] bool first_tile = true;
  if constexpr (!GROUPED) let_next_start();
  // How many slots the experts have is known on the GPU only.
  __shared__ Work counted;
  if constexpr (GROUPED) {
    if (threadIdx.x == 0) counted = Work(args.n, args.k, T::kRows, T::kWK, *args.padded_slots / T::kTokens, gridDim.x);
    __syncthreads();
  }
  const Work &work = GROUPED ? counted : known;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wk = warp % T::kWK, wn = warp / T::kWK % T::kWN, wm = warp / (T::kWK * T::kWN);

  // Backwards: of the tiles that a block shares, the one that others wait for comes first, the one it waits for last.
  const unsigned run_begin = work.begin(blockIdx.x);
  for (unsigned run_end = work.begin(blockIdx.x + 1); run_end > run_begin;) {
    const unsigned tile = (run_end - 1) / work.stages;
    const int end = run_end - tile * work.stages.value;
    run_end = max(run_begin, tile * work.stages.value);
    const int begin = run_end - tile * work.stages.value;
    const Target<T, GROUPED> target(args, work, tile);

    Weights weights[kRowTiles];
    typename Weights::Source sources[kRowTiles];
    const int limit = T::kWK == 1 ? end : min(end, (column_tiles - wk + T::kWK - 1) / T::kWK);
    int stage = begin;
    const Reload<Weights, kRowTiles> reload{weights, sources, limit, stage};
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      // Past the last row tile that one is read again, and not written.
      const int tile_row = min(target.first_row / kTileRows + wn * kRowTiles + r, tile_rows - 1);
      const unsigned row = static_cast<unsigned>(target.expert) * tile_rows + tile_row;
      sources[r].seek(args.codes, args.scales, row * column_tiles + begin * T::kWK + wk, lane);
      reload.scales(r);
#pragma unroll
      for (int h = 0; h < Weights::kHalves; ++h) reload.half(r, h);
    }
    if constexpr (kStartsEarly && !GROUPED) {
      if (first_tile) {
        uint32_t seen = 0;
#pragma unroll
        for (const Weights &tile_weights : weights) seen ^= tile_weights.all_bits();
        need(seen);
        wait_for_earlier();
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
    // As one number where stages are short, or the compiler adds its parts again in each.
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

    // A few tokens at a time go through shared memory, where the WK warps' sums meet and rows lie side by side.
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
