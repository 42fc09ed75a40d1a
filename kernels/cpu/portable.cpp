// The kernels in plain C++ for any machine. They are the reference for the vector ones, and what those are tested against.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "cpu/layout.h"

namespace voltserve::cpu {
namespace {

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Vector {
  static constexpr int width = kTileRows;
  static constexpr int max_rows = 2;
  struct F {
    float row[width];
  };
  static F zero() { return {}; }
  static F set(float a) {
    return each([a](int) { return a; });
  }
  static F load(const float *from) {
    return each([from](int r) { return from[r]; });
  }
  static F load16(const uint16_t *from, bool bfloat16) {
    return each([=](int r) { return bfloat16 ? from_bits(uint32_t{from[r]} << 16) : from_half(from[r]); });
  }
  static void store(float *to, const F &a) { std::copy_n(a.row, width, to); }
  static float broadcast(float a) { return a; }
  static F add(const F &a, const F &b) {
    return each([&](int r) { return a.row[r] + b.row[r]; });
  }
  static F sub(const F &a, const F &b) {
    return each([&](int r) { return a.row[r] - b.row[r]; });
  }
  static F mul(const F &a, const F &b) {
    return each([&](int r) { return a.row[r] * b.row[r]; });
  }
  static F div(const F &a, const F &b) {
    return each([&](int r) { return a.row[r] / b.row[r]; });
  }
  static F fma(const F &a, float b, const F &c) {
    return each([&](int r) { return a.row[r] * b + c.row[r]; });
  }
  static F fma(const F &a, const F &b, const F &c) {
    return each([&](int r) { return a.row[r] * b.row[r] + c.row[r]; });
  }
  static F exp(const F &a) {
    return each([&](int r) { return std::exp(a.row[r]); });
  }
  static float sum(const F &a) { return std::accumulate(a.row, a.row + width, 0.0f); }

  // E4M3: 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal, with the unit of exponent 1. Times 2^-8.
  static F scales(const uint8_t *bytes) {
    return each([=](int r) {
      const int exponent = bytes[r] >> 3 & 0xF, mantissa = (bytes[r] & 7) + (exponent ? 8 : 0);
      const float magnitude = static_cast<float>(mantissa << (exponent ? exponent : 1)) * 0x1p-18f;
      return bytes[r] & 0x80 ? -magnitude : magnitude;
    });
  }

  static void decode(const uint8_t *bytes, int nibble, F *column) {
    for (int c = 0; c < kNibbleColumns; ++c) {
      column[c] = each([=](int r) { return kE2m1[bytes[step_byte(r, c)] >> (nibble * 4) & 0xF]; });
    }
  }

 private:
  template <class Function>
  static F each(Function of_row) {
    F made;
    for (int r = 0; r < width; ++r) made.row[r] = of_row(r);
    return made;
  }
  static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  // float16: 5 bits of exponent (bias 15), 10 of mantissa. In a float32's places it is 2^-112 times the value.
  static float from_half(uint16_t half) {
    const uint32_t sign = uint32_t{half} >> 15 << 31, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);  // infinite or NaN
    return from_bits(sign | rest << 13) * 0x1p112f;
  }
};

}  // namespace
}  // namespace voltserve::cpu

#include "cpu/table.inl"

namespace voltserve::cpu {

constexpr Kernels kPortable = table("portable", [] { return true; });

}  // namespace voltserve::cpu