// The kernels with AVX2, FMA and F16C: 8 rows of W per register. setup.py sets the flags; they run only where the CPU has them.
#include <immintrin.h>

#include "cpu/e2m1_bfloat16.h"
#include "cpu/exp.h"

namespace voltserve::cpu {
namespace {

struct Vector {
  static constexpr int width = 8;
  static constexpr int max_rows = 8;
  using F = __m256;
  static F zero() { return _mm256_setzero_ps(); }
  static void store(float *to, F a) { _mm256_storeu_ps(to, a); }
  static F load(const float *from) { return _mm256_loadu_ps(from); }
  static F load16(const uint16_t *from, bool bfloat16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    if (bfloat16) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    return _mm256_cvtph_ps(bits);
  }
  static F set(float a) { return _mm256_set1_ps(a); }
  static F broadcast(const float &a) { return _mm256_broadcast_ss(&a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static F clamp(F a, float low, float high) { return _mm256_max_ps(_mm256_min_ps(a, set(high)), set(low)); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power_of_two(F n) {  // for whole n
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F exp(F a) { return exp_of<Vector>(a); }
  static float sum(F a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }

  // 8 E4M3 bytes: the seven bits below the sign, moved up by 7, are a float16 that is 2^-8 times the value.
  static F scales(const uint8_t *bytes) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<short>(0xBF80))));
  }

  static void decode(const uint8_t *bytes, int nibble, F *column) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(packed, nibble * 4), _mm256_set1_epi8(0xF));
    const __m256i high = _mm256_shuffle_epi8(table(kHigh), codes), low = _mm256_shuffle_epi8(table(kLow), codes);
    two_columns(_mm256_unpacklo_epi8(low, high), column);
    two_columns(_mm256_unpackhi_epi8(low, high), column + 2);
  }

 private:
  static void two_columns(__m256i pairs, F *column) {
    column[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    column[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static __m256i table(const uint8_t *values) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(values)));
  }
};

}  // namespace
}  // namespace voltserve::cpu

#include "cpu/table.inl"

namespace voltserve::cpu {

constexpr Kernels kAvx2 =
    table("avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); });

}  // namespace voltserve::cpu
