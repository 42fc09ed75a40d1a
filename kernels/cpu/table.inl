// All kernels for one vector type, and the table of them. Each instruction set's file defines `Vector` and includes this one.
#include "cpu/nvfp4_linear.inl"
//
#include "cpu/fp8_linear.inl"
//
#include "cpu/layers.inl"
//
#include "cpu/decoder.inl"
//
#include "cpu/gdn.inl"

namespace voltserve::cpu {
namespace {

constexpr Kernels table(const char *isa, bool (*supported)()) {
  return {isa,      supported,    linear, dequantize,      fp8_linear,    fp8_dequantize,  linear16,
          rms_norm, silu_and_mul, attend, norm_and_rotate, causal_conv1d, gated_delta_rule};
}

}  // namespace
}  // namespace voltserve::cpu
