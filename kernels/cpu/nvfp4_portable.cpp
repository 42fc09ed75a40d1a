// The kernels in plain C++, for any machine: the twin of the vector ones, and what they are tested against.
#include <cstdint>

#include "layout.h"

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
  static void store(float* to, const F& a) {
    for (int r = 0; r < width; ++r) to[r] = a.row[r];
  }
  static float broadcast(float a) { return a; }
  static F add(F a, const F& b) {
    for (int r = 0; r < width; ++r) a.row[r] += b.row[r];
    return a;
  }
  static F mul(F a, const F& b) {
    for (int r = 0; r < width; ++r) a.row[r] *= b.row[r];
    return a;
  }
  static F fma(const F& a, float b, F c) {
    for (int r = 0; r < width; ++r) c.row[r] += a.row[r] * b;
    return c;
  }
  static F fma(const F& a, const F& b, F c) {
    for (int r = 0; r < width; ++r) c.row[r] += a.row[r] * b.row[r];
    return c;
  }

  // E4M3: 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal, with the unit of exponent 1. Times 2^-8.
  static F scales(const uint8_t* bytes) {
    F value;
    for (int r = 0; r < width; ++r) {
      const int exponent = bytes[r] >> 3 & 0xF, mantissa = (bytes[r] & 7) + (exponent ? 8 : 0);
      const float magnitude = static_cast<float>(mantissa << (exponent ? exponent : 1)) * 0x1p-18f;
      value.row[r] = bytes[r] & 0x80 ? -magnitude : magnitude;
    }
    return value;
  }

  static void decode(const uint8_t* bytes, F* column) {
    for (int c = 0; c < kStepColumns; ++c) {
      for (int r = 0; r < width; ++r) column[c].row[r] = kE2m1[bytes[step_byte(r, c)] >> (c / 4 * 4) & 0xF];
    }
  }
};

}  // namespace
}  // namespace voltserve::cpu

#include "nvfp4_linear.inl"

namespace voltserve::cpu {

const Kernels kPortable = {"portable", [] { return true; }, linear, dequantize};

}  // namespace voltserve::cpu
