// What surrounds the NVFP4 GEMMs in a decoder layer, in float32, for any vector type. A step of few tokens consists of these and of
// the overhead of starting them. So each reads its operands once and replaces several passes.
//
// Needs of `Vector`, beside what nvfp4_linear.inl needs: set (all elements); load; load16 (width float16 or bfloat16 numbers);
// sub; div; exp; sum (of its elements).
#include <cmath>

namespace voltserve::cpu {
namespace {

// y [m, N] = x [m, K] W^T for rows row_begin .. row_end of W [N, K], float16 or bfloat16, row-major like embeddings. kRows rows of
// W are read side by side: that many independent sums hide the latency of additions.
template <int M, int kRows>
void rows_times(const Linear16 &w, const float *x, int64_t row, float *y) {
  F sum[kRows][M];
  for (auto &one : sum) std::fill_n(one, M, Vector::zero());
  for (int64_t k = 0; k < w.columns; k += Vector::width) {
    F of_x[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) of_x[m] = Vector::load(x + m * w.columns + k);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F of_w = Vector::load16(w.weight + (row + r) * w.columns + k, w.bfloat16);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[r][m] = Vector::fma(of_w, of_x[m], sum[r][m]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < kRows; ++r) y[m * w.rows + row + r] = Vector::sum(sum[r][m]);
  }
}

template <int M>
void rows_times_all(const Linear16 &w, const float *x, float *y, int64_t row_begin, int64_t row_end) {
  constexpr int kRows = M <= 2 ? 4 : M <= 4 ? 2 : 1;
  int64_t row = row_begin;
  for (; row + kRows <= row_end; row += kRows) rows_times<M, kRows>(w, x, row, y);
  for (; row < row_end; ++row) rows_times<M, 1>(w, x, row, y);
}

template <int M = kMaxRows>
void rows_times_up_to(int64_t m, const Linear16 &w, const float *x, float *y, int64_t row_begin, int64_t row_end) {
  if (m == M) return rows_times_all<M>(w, x, y, row_begin, row_end);
  if constexpr (M > 1) rows_times_up_to<M - 1>(m, w, x, y, row_begin, row_end);
}

void linear16(const Linear16 &w, const float *x, int64_t m, float *y, int64_t row_begin, int64_t row_end) {
  // Few rows of W at a time, so that they are still cached for the next rows of x.
  constexpr int64_t kCached = 64;
  for (int64_t row = row_begin; row < row_end; row += kCached) {
    for (int64_t from = 0; from < m; from += kMaxRows) {
      const int64_t rows = std::min<int64_t>(kMaxRows, m - from);
      rows_times_up_to(rows, w, x + from * w.columns, y + from * w.rows, row, std::min(row_end, row + kCached));
    }
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight, for m rows of n numbers. Where residual is given, it becomes x + residual and replaces x.
// y may be x.
void rms_norm(const float *x, float *residual, const float *weight, float eps, float *y, int64_t m, int64_t n) {
  const int64_t whole = n - n % Vector::width;
  for (int64_t row = 0; row < m; ++row, x += n, y += n) {
    const float *values = x;
    if (residual) {
      for (int64_t i = 0; i < n; ++i) residual[i] += x[i];
      values = residual;
      residual += n;
    }
    F squares = Vector::zero();
    float tail = 0;
    for (int64_t i = 0; i < whole; i += Vector::width) {
      const F value = Vector::load(values + i);
      squares = Vector::fma(value, value, squares);
    }
    for (int64_t i = whole; i < n; ++i) tail += values[i] * values[i];
    const float scale = 1.0f / std::sqrt((Vector::sum(squares) + tail) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = values[i] * scale * weight[i];
  }
}

// y [m, n] = silu(a) * b, with x [m, 2n] = (a, b) and silu(a) = a / (1 + exp(-a)).
void silu_and_mul(const float *x, float *y, int64_t m, int64_t n) {
  const int64_t whole = n - n % Vector::width;
  const F one = Vector::set(1.0f);
  for (int64_t row = 0; row < m; ++row, x += 2 * n, y += n) {
    for (int64_t i = 0; i < whole; i += Vector::width) {
      const F a = Vector::load(x + i), b = Vector::load(x + n + i);
      Vector::store(y + i, Vector::mul(Vector::div(a, Vector::add(one, Vector::exp(Vector::sub(Vector::zero(), a)))), b));
    }
    for (int64_t i = whole; i < n; ++i) y[i] = x[i] / (1.0f + std::exp(-x[i])) * x[n + i];
  }
}

}  // namespace
}  // namespace voltserve::cpu
