// exp in float32 for vector registers.
#pragma once

#include <initializer_list>

namespace voltserve::cpu {

// exp(a) = 2^n exp(r) with a = n ln 2 + r, |r| <= ln(2) / 2, and exp(r) a polynomial. The split of ln 2 and the coefficients are
// those of Cephes' expf (S. L. Moshier), good to 2 units in the last place. The result is infinite from 88.4 up, where n is 128.
// From -87 down it stays at exp(-87), the last normal number.
template <class Vector>
inline auto exp_of(typename Vector::F a) {
  const auto x = Vector::clamp(a, -87.0f, 89.0f);
  const auto n = Vector::round(Vector::mul(x, Vector::set(1.44269504f)));
  auto r = Vector::fma(n, Vector::set(-0.693359375f), x);
  r = Vector::fma(n, Vector::set(2.12194440e-4f), r);
  auto p = Vector::set(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = Vector::fma(p, r, Vector::set(c));
  }
  p = Vector::add(Vector::fma(p, Vector::mul(r, r), r), Vector::set(1.0f));
  return Vector::mul(p, Vector::power_of_two(n));
}

}  // namespace voltserve::cpu
