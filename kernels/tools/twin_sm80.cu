// The mma8 and mma16 kernels with mma.m16n8k16 (sm_80 and later) in place of mma.m8n8k4, which newer GPUs emulate: same packed weights,
// same skeleton, staging and sums over slices (cuda/linear.cuh). It times, on a GPU at hand, all that the Volta kernel does apart
// from the tensor cores themselves. Not part of the product.
//
// Operand A is 16 rows of W by 16 columns, operand B 16 columns by 8 tokens. Lane (g, t) = (lane / 4, lane % 4) holds rows g and
// g + 8; of a tile's 32 rows it reads word t of rows g, g+8, g+16, g+24. The order of columns inside a product is free as
// long as both operands agree: lane t's four columns of the first product are columns 8t .. 8t+3 of 32, of the second 8t+4 .. 8t+7.
#include <cuda_runtime.h>

#include "../cuda/linear.cuh"
#include "../cuda/plan.h"

namespace voltserve {
namespace {

template <int GROUP>
struct SpreadSource {
  const uint32_t *codes;
  const uint8_t *scales;

  __device__ void seek(const uint4 *all_codes, const uint8_t *all_scales, size_t tile, int lane) {
    codes = reinterpret_cast<const uint32_t *>(all_codes + tile * kTileCodes) + lane;  // row lane / 4, word lane % 4
    scales = all_scales + (tile * kTileRows + lane / 4) * scale_bytes(GROUP);
  }
  __device__ void step(int tiles) {
    codes += tiles * kTileCodes * 4;
    scales += tiles * kTileRows * scale_bytes(GROUP);
  }
};

template <int GROUP>
struct SpreadTile {
  using Source = SpreadSource<GROUP>;
  static constexpr int kHalves = 2;

  uint32_t codes[kHalves][4];  // [half][row g + 8i], word t
  uint32_t scales[4];

  __device__ void load_half(const Source &source, int half, bool inside) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[half][i] = 0;
      if (inside) {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];"
                     : "=r"(codes[half][i])
                     : "l"(source.codes + half * 128 + i * 32));
      }
    }
  }
  __device__ void load_scales(const Source &source, bool inside) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i] = 0;
      if (!inside) continue;
      const uint8_t *at = source.scales + i * 8 * scale_bytes(GROUP);
      scales[i] = GROUP == 16 ? __ldg(reinterpret_cast<const uint32_t *>(at)) : __ldg(reinterpret_cast<const uint16_t *>(at));
    }
  }
};

template <int TOKEN_TILES, int ROW_TILES>
struct Twin {
  using X = half;
  template <int GROUP>
  using Weights = SpreadTile<GROUP>;
  static constexpr int kTokens = 8 * TOKEN_TILES, kRowTiles = ROW_TILES;
  static constexpr int kParts = TOKEN_TILES, kPartTokens = 8;
  static constexpr float kFactor = kScaleFactor;

  float sums[TOKEN_TILES][ROW_TILES][2][4] = {};

  static __device__ void store_x(half *to, uint4 halves) { *reinterpret_cast<uint4 *>(to) = halves; }

  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply(const half *x, SpreadTile<GROUP> (&tiles)[ROW_TILES], int lane, Reload reload) {
    const half *const mine = x + lane / 4 * STRIDE + lane % 4 * 8;
    const half2 lift = __float2half2_rn(kCodeFactor);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      half2 scales[4][2];  // [row][half]: a lane's 8 columns share a scale, even byte pairs picked by t
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Group of columns 32h + 8t: 16: bytes 2h and 2h+1 by t < 2; 32: byte h. Put to the high bytes.
        const uint32_t bytes = __byte_perm(tiles[r].scales[i], 0, GROUP == 32 ? 0x1404 : lane % 4 < 2 ? 0x2404 : 0x3414);
        const half2 placed = as_half2((bytes & 0x80008000u) | (bytes >> 1 & 0x3F803F80u));
        const half2 lifted = __hmul2(placed, lift);
        scales[i][0] = __low2half2(lifted);
        scales[i][1] = __high2half2(lifted);
      }
      reload.scales(r);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        half2 weights[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          decode_word(tiles[r].codes[h][i], weights[i]);
#pragma unroll
          for (int p = 0; p < 4; ++p) weights[i][p] = __hmul2(weights[i][p], scales[i][h]);
        }
        reload.half(r, h);
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
          const uint4 b = *reinterpret_cast<const uint4 *>(mine + t * 8 * STRIDE + h * 32);
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            mma(sums[t][r][s], weights[2 * s][0], weights[2 * s + 1][0], weights[2 * s][1], weights[2 * s + 1][1], b.x, b.y);
            mma(sums[t][r][s], weights[2 * s][2], weights[2 * s + 1][2], weights[2 * s][3], weights[2 * s + 1][3], b.z, b.w);
          }
        }
      }
    }
  }

  static __device__ void mma(float (&d)[4], half2 a0, half2 a1, half2 a2, half2 a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(as_bits(a0)), "r"(as_bits(a1)), "r"(as_bits(a2)), "r"(as_bits(a3)), "r"(b0), "r"(b1));
  }

  template <class Visit>
  __device__ void part(int token_tile, int lane, Visit visit) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          visit(lane % 4 * 2 + i % 2, r * kTileRows + s * 16 + lane / 4 + i / 2 * 8, sums[token_tile][r][s][i]);
        }
      }
    }
  }
};

template <class Math, int MIN_BLOCKS, int GROUP>
cudaError_t launch_twin(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  using T = Tile<Math, 1, 1, 4, GROUP>;
  linear_kernel<Math, T, MIN_BLOCKS, false><<<plan.blocks, T::kThreads, T::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace
}  // namespace voltserve

// As voltserve_linear, for the variants mma8 and mma16.
extern "C" int voltserve_twin(const voltserve::LinearArgs *args, int group, const voltserve::Plan *plan, cudaStream_t stream) {
  using namespace voltserve;
  if (plan->variant == Variant::mma8) {
    return group == 16 ? launch_twin<Twin<1, 2>, 5, 16>(*args, *plan, stream) : launch_twin<Twin<1, 2>, 5, 32>(*args, *plan, stream);
  }
  if (plan->variant == Variant::mma16) {
    return group == 16 ? launch_twin<Twin<2, 2>, 4, 16>(*args, *plan, stream) : launch_twin<Twin<2, 2>, 4, 32>(*args, *plan, stream);
  }
  return cudaErrorInvalidConfiguration;
}
