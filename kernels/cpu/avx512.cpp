// The kernels with AVX-512 F and BW: 16 rows of W per register. setup.py sets the flags; they run only where the CPU has them.
#include <immintrin.h>

#include "cpu/e2m1_bfloat16.h"
#include "cpu/exp.h"

namespace voltserve::cpu {
namespace {

struct Vector {
  static constexpr int width = 16;
  static constexpr int max_rows = 8;
  using F = __m512;
  static F zero() { return _mm512_setzero_ps(); }
  static void store(float *to, F a) { _mm512_storeu_ps(to, a); }
  static F load(const float *from) { return _mm512_loadu_ps(from); }
  static F load16(const uint16_t *from, bool bfloat16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    if (bfloat16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    return _mm512_cvtph_ps(bits);
  }
  static F set(float a) { return _mm512_set1_ps(a); }
  static F broadcast(const float &a) { return _mm512_set1_ps(a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static F clamp(F a, float low, float high) { return _mm512_max_ps(_mm512_min_ps(a, set(high)), set(low)); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power_of_two(F n) {  // for whole n
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static F exp(F a) { return exp_of<Vector>(a); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }

  // 16 E4M3 bytes: the seven bits below the sign, moved up by 7, are a float16 that is 2^-8 times the value.
  static F scales(const uint8_t *bytes) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
    const __m256i sign_and_value = _mm256_set1_epi16(static_cast<short>(0xBF80));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), sign_and_value));
  }

  static void decode(const uint8_t *bytes, int nibble, F *column) {
    const __m512i packed = _mm512_loadu_si512(bytes);
    const __m512i codes = _mm512_and_si512(_mm512_srli_epi16(packed, nibble * 4), _mm512_set1_epi8(0xF));
    const __m512i high = _mm512_shuffle_epi8(table(kHigh), codes), low = _mm512_shuffle_epi8(table(kLow), codes);
    two_columns(_mm512_unpacklo_epi8(low, high), column);
    two_columns(_mm512_unpackhi_epi8(low, high), column + 2);
  }

 private:
  static void two_columns(__m512i pairs, F *column) {
    column[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    column[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static __m512i table(const uint8_t *values) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(values)));
  }
};

}  // namespace
}  // namespace voltserve::cpu

#include "cpu/table.inl"

namespace voltserve::cpu {

constexpr Kernels kAvx512 = table("avx512", [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); });

}  // namespace voltserve::cpu
