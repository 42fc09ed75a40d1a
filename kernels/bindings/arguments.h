// Checks of the arguments of torch.ops.voltserve.*, the same on every device. Each raises RuntimeError with the argument's name, what was
// expected and what was given. Only bindings/ and cuda/*/ops.cpp include it, because it knows torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace voltserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device on which every tensor of a call must be: the CPU, or the GPU of this index.
struct Place {
  int gpu;
};
inline constexpr Place kCpu{-1};

inline std::string name_of(Place place) { return place.gpu < 0 ? "the CPU" : "GPU " + std::to_string(place.gpu); }
inline const char *name_of(ScalarType dtype) { return torch::headeronly::toString(dtype); }

inline Place place_of(const Tensor &tensor) { return tensor.is_cpu() ? kCpu : Place{tensor.get_device_index()}; }

inline std::vector<int64_t> shape_of(const Tensor &tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (int64_t d = 0; d < tensor.dim(); ++d) shape[d] = tensor.size(d);
  return shape;
}

// For example "Half [2, any]"; a negative length means any.
inline std::string describe(ScalarType dtype, const std::vector<int64_t> &shape) {
  std::string text = std::string(name_of(dtype)) + " [";
  for (size_t d = 0; d < shape.size(); ++d) {
    text += (d ? ", " : "") + (shape[d] < 0 ? "any" : std::to_string(shape[d]));
  }
  return text + "]";
}

inline std::string describe(const Tensor &tensor) {
  return (tensor.is_contiguous() ? "" : "non-contiguous ") + describe(tensor.scalar_type(), shape_of(tensor)) + " on " +
         name_of(place_of(tensor));
}

enum class Layout { contiguous, strided };

// Expects place, dtype, shape (-1: any length) and, unless the op reads strides, contiguity.
inline void expect(const char *name, const Tensor &tensor, Place place, ScalarType dtype, const std::vector<int64_t> &shape,
                   Layout layout = Layout::contiguous) {
  bool fits = place_of(tensor).gpu == place.gpu && tensor.scalar_type() == dtype &&
              tensor.dim() == static_cast<int64_t>(shape.size()) && (layout == Layout::strided || tensor.is_contiguous());
  for (size_t d = 0; fits && d < shape.size(); ++d) fits = shape[d] < 0 || tensor.size(d) == shape[d];
  STD_TORCH_CHECK(fits, name, ": expected ", layout == Layout::strided ? "" : "contiguous ", describe(dtype, shape), " on ",
                  name_of(place), ", got ", describe(tensor));
}

inline void expect_dtype(const char *name, ScalarType dtype, std::initializer_list<ScalarType> allowed) {
  bool fits = false;
  std::string expected;
  for (const ScalarType *one = allowed.begin(); one != allowed.end(); ++one) {
    fits = fits || *one == dtype;
    expected += (one == allowed.begin() ? "" : one + 1 == allowed.end() ? " or " : ", ") + std::string(name_of(*one));
  }
  STD_TORCH_CHECK(fits, name, ": expected ", expected, ", got ", name_of(dtype));
}

// Expects x [..., length], with any strides.
inline void expect_last_dimension(const char *name, const Tensor &tensor, Place place, int64_t length) {
  const bool fits = place_of(tensor).gpu == place.gpu && tensor.dim() > 0 && tensor.size(tensor.dim() - 1) == length;
  STD_TORCH_CHECK(fits, name, ": expected [..., ", length, "] on ", name_of(place), ", got ", describe(tensor));
}

inline void expect_multiple(const char *name, const char *dimension, int64_t length, int64_t factor) {
  STD_TORCH_CHECK(length % factor == 0, name, ": expected ", dimension, " a multiple of ", factor, ", got ", dimension, " = ",
                  length);
}

inline void expect_at_least(const char *name, int64_t value, int64_t least) {
  STD_TORCH_CHECK(value >= least, name, ": expected at least ", least, ", got ", value);
}

inline void expect_group_size(int64_t group_size) {
  STD_TORCH_CHECK(group_size == 16 || group_size == 32, "group_size: expected 16 or 32, got ", group_size);
}

}  // namespace voltserve
