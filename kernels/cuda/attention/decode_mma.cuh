// The tensor core products of a decoding warp: 8 rows (pairs of new token and query head) by 16 cached positions, two groups of 8.
//
// Keys and values arrive from memory as 16-byte chunks of 8 dimensions. They are operands exactly as they lie in the registers, so
// neither passes through shared memory.
//
// Volta: mma.m8n8k4 (HMMA.884). A lane is number l = 0 .. 3 of quad-pair p = 0 .. 3, in its half h.
//   Scores  operand A is the 8 rows, shared by all; operand B is positions, one per lane. The quad-pairs differ in the dimensions, so
//           a warp reads 64 bytes of each of 8 positions at once, and scores are added across lanes. Rows and positions are assigned
//           to the quad-pairs so that each sends the half of its sums that it does not keep from the same registers.
//   Output  operand A is the weights, operand B the values. The quad-pairs differ in the dimensions.
//
// Ampere and later emulate m8n8k4, so they use mma.m16n8k16.
//   Scores  operand A is 16 positions of keys, operand B the 8 rows, so scores come out transposed.
//   Output  operand A is 16 dimensions of values as pairs of positions, which bytes of two registers make. Operand B is the weights,
//           transposed by one instruction (8 by 8 numbers).
//
// Fragments: PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type" and "... for mma.m16n8k16 with floating point
// type". Products and sums are fp32.
#pragma once

#include "cuda/attention/mma.cuh"
#include "cuda/common/layout.cuh"

namespace voltserve {

constexpr int kWarpRows = 8, kWarpPositions = 16;

#if __CUDA_ARCH__ >= 800
template <int HEAD_DIM>
struct DecodeProducts {
  static constexpr int kGroups = ceil_div(HEAD_DIM, 64), kKeyChunks = ceil_div(HEAD_DIM, 32);
  static constexpr int kHeldRows = 2, kHeldPositions = 2;  // the rows and positions whose scores this lane holds
  static constexpr int kRowBits = 4 | 8 | 16;  // bits of the lane number: lanes that differ only in these hold the same rows

  int lane;
  float sum[kGroups][4][4] = {};

  __device__ explicit DecodeProducts(int lane_) : lane(lane_) {}

  // A lane loads chunks key_chunk() + 4j of row query_row(), and of position key_position() in each group of 8. Of values it loads
  // chunks value_chunk() + 8g of position value_position(i) in group i / 2.
  __device__ int query_row() const { return lane / 4; }
  __device__ int key_position() const { return lane / 4; }
  __device__ int key_chunk() const { return lane % 4; }
  __device__ int value_position(int i) const { return lane % 4 * 2 + i % 2; }
  __device__ int value_chunk() const { return lane / 4; }

  __device__ int score_row(int r) const { return lane % 4 * 2 + r; }
  __device__ int score_position(int i) const { return lane / 4 + 8 * i; }

  // query(j): chunk key_chunk() + 4j of this lane's row.
  template <class Query>
  __device__ void scores(Query query, const uint4 (&k)[2][kKeyChunks], float (&score)[kHeldRows][kHeldPositions]) const {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      const uint4 q = query(j);
      multiply_16816(even, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, q.x, q.y);
      multiply_16816(odd, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, q.z, q.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) score[e % 2][e / 2] = even[e] + odd[e];
  }

  // sum += weight v.
  __device__ void add(const float (&weight)[kHeldRows][kHeldPositions], const uint4 (&v)[4][kGroups]) {
    uint32_t operand[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = as_bits(__floats2half2_rn(weight[0][i], weight[1][i]));
      asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(operand[i]) : "r"(pair));
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      auto multiply = [&](float (&d)[4], uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
        multiply_16816(d, __byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632), __byte_perm(w2, w3, 0x5410),
                       __byte_perm(w2, w3, 0x7632), operand[0], operand[1]);
      };
      multiply(sum[g][0], v[0][g].x, v[1][g].x, v[2][g].x, v[3][g].x);
      multiply(sum[g][1], v[0][g].y, v[1][g].y, v[2][g].y, v[3][g].y);
      multiply(sum[g][2], v[0][g].z, v[1][g].z, v[2][g].z, v[3][g].z);
      multiply(sum[g][3], v[0][g].w, v[1][g].w, v[2][g].w, v[3][g].w);
    }
  }

  // Multiplies the sums of each row by its factor, which the lanes with the row's scores hold.
  __device__ void scale(const float (&factor)[kHeldRows]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[g][w][e] *= factor[e % 2];
      }
    }
  }

  // Calls visit(row, dimension, sums of that dimension and the next) for all sums that this lane holds.
  template <class Visit>
  __device__ void each(Visit visit) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          visit(lane % 4 * 2 + r, 64 * g + 8 * value_chunk() + 2 * w, make_float2(sum[g][w][r], sum[g][w][r + 2]));
        }
      }
    }
  }
};
#else
template <int HEAD_DIM>
struct DecodeProducts {
  static constexpr int kGroups = ceil_div(HEAD_DIM, 64), kKeyChunks = ceil_div(HEAD_DIM, 32);
  static constexpr int kHeldRows = 1, kHeldPositions = 4;
  static constexpr int kRowBits = 2 | 8;

  int lane;
  float sum[kGroups][2][8] = {};

  __device__ explicit DecodeProducts(int lane_) : lane(lane_) {}

  __device__ int number() const { return lane % 4 + lane / 16 * 4; }  // within the quad-pair
  __device__ int quad_pair() const { return lane / 4 % 4; }
  __device__ int query_row() const { return number() ^ 2 * (quad_pair() & 1); }
  __device__ int key_position() const { return number() ^ 2 * (quad_pair() & 2); }
  __device__ int key_chunk() const { return quad_pair(); }
  __device__ int value_position(int i) const { return i % 2 * 4 + lane % 4; }
  __device__ int value_chunk() const { return 2 * quad_pair() + lane / 16; }

  __device__ int score_row(int) const { return (lane & 1) + (lane & 4) / 2 + lane / 16 * 4; }
  __device__ int score_position(int i) const { return 8 * (i / 2) + (lane & 8) / 2 + (lane & 2) + i % 2; }

  // query(j): chunk key_chunk() + 4j of this lane's row.
  template <class Query>
  __device__ void scores(Query query, const uint4 (&k)[2][kKeyChunks], float (&score)[kHeldRows][kHeldPositions]) const {
    float parts[2][8] = {};
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      const uint4 q = query(j);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        multiply_884<false>(parts[u], q.x, q.y, k[u][j].x, k[u][j].y);
        multiply_884<false>(parts[u], q.z, q.w, k[u][j].z, k[u][j].w);
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int e = 0; e < 4; ++e) parts[u][e] += __shfl_xor_sync(~0u, parts[u][e + 4], 8);
#pragma unroll
      for (int e = 0; e < 2; ++e) score[0][2 * u + e] = parts[u][e] + __shfl_xor_sync(~0u, parts[u][e + 2], 4);
    }
  }

  __device__ void add(const float (&weight)[kHeldRows][kHeldPositions], const uint4 (&v)[4][kGroups]) {
    // The scores of row number() are in the lanes with this lane's bits 0 and 4, and its bit 1 as their bit 2.
    const int from = (lane & 17) + 2 * (lane & 2);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t pair = as_bits(__floats2half2_rn(weight[0][2 * u], weight[0][2 * u + 1]));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t a0 = __shfl_sync(~0u, pair, from + 8 * s), a1 = __shfl_sync(~0u, pair, from + 8 * s + 2);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint4 &values = v[2 * u + s][g];
          multiply_884<true>(sum[g][0], a0, a1, values.x, values.y);
          multiply_884<true>(sum[g][1], a0, a1, values.z, values.w);
        }
      }
    }
  }

  __device__ void scale(const float (&factor)[kHeldRows]) {
    const float factors[2] = {__shfl_sync(~0u, factor[0], lane & 17), __shfl_sync(~0u, factor[0], (lane & 17) + 4)};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < 16; ++e) sum[g][e / 8][e % 8] *= factors[e / 2 % 2];
    }
  }

  template <class Visit>
  __device__ void each(Visit visit) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const float *const s = sum[g][upper] + e;
          visit((lane & 1) + (e & 2) + lane / 16 * 4, 64 * g + 8 * (2 * quad_pair() + e / 4) + 4 * upper + (lane & 2),
                make_float2(s[0], s[1]));
        }
      }
    }
  }
};
#endif

}  // namespace voltserve
