// The ops that run all decoder layers at once: schemas, checks. The contract is contracts/decoder.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "cpu/decoder.h"
#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "bindings/paged_arguments.h"

namespace {

using namespace voltserve;
using namespace voltserve::cpu;

// All decoders made so far, with the tensors that they read. Never destroyed, like the pool; a deque moves none when it grows.
struct Made {
  Made(std::vector<Tensor> tensors, Tensor final_norm, DecoderShape shape, std::vector<DecoderLayer> layers)
      : tensors(std::move(tensors)),
        final_norm(final_norm),
        decoder(shape, std::move(layers), static_cast<const float *>(final_norm.const_data_ptr())) {}

  const std::vector<Tensor> tensors;
  const Tensor final_norm;
  Decoder decoder;
};

std::deque<Made> &all() {
  static auto *made = new std::deque<Made>;
  return *made;
}

const float *floats(const char *name, const Tensor &tensor, const std::vector<int64_t> &shape) {
  expect(name, tensor, kCpu, ScalarType::Float, shape);
  return static_cast<const float *>(tensor.const_data_ptr());
}

const float *floats_if_any(const char *name, const Tensor &tensor, int64_t length) {
  return floats(name, tensor, {tensor.numel() ? length : 0}) ? static_cast<const float *>(tensor.const_data_ptr()) : nullptr;
}

Nvfp4Matrix matrix(const char *name, const Tensor *tensors, int64_t rows, int64_t columns, int64_t group_size) {
  const int64_t padded = tiles_of(rows) * kTileRows;
  expect(name, tensors[0], kCpu, ScalarType::Byte, {padded, columns / 2});
  expect(name, tensors[1], kCpu, ScalarType::Float8_e4m3fn, {padded, columns / group_size});
  return {static_cast<const uint8_t *>(tensors[0].const_data_ptr()),
          static_cast<const uint8_t *>(tensors[1].const_data_ptr()),
          floats(name, tensors[2], {rows}),
          rows,
          columns,
          static_cast<int>(group_size)};
}

int64_t make(std::vector<Tensor> tensors, Tensor final_norm, int64_t group_size, int64_t heads, int64_t kv_heads, double eps,
             double scale) {
  expect_group_size(group_size);
  expect_at_least("kv_heads", kv_heads, 1);
  expect_multiple("heads", "their number", heads, kv_heads);
  STD_TORCH_CHECK(!tensors.empty() && tensors.size() % kLayerTensors == 0, "tensors: expected ", int{kLayerTensors},
                  " a layer, got ", tensors.size());
  expect("final_norm", final_norm, kCpu, ScalarType::Float, {-1});
  const int64_t hidden = final_norm.size(0);
  const int64_t rows = tensors[kQkvFactor].numel(), dim = rows / (heads + 2 * kv_heads);
  expect_multiple("qkv", "rows", rows, heads + 2 * kv_heads);
  expect_multiple("qkv", "head dimension", dim, kHeadUnit);
  STD_TORCH_CHECK(dim <= kMaxHeadDim, "qkv: expected a head dimension of at most ", kMaxHeadDim, ", got ", dim);
  const int64_t intermediate = tensors[kGateUpFactor].numel() / 2;
  for (const int64_t columns : {hidden, heads * dim, intermediate}) expect_multiple("tensors", "K", columns, group_size);
  std::vector<DecoderLayer> layers;
  for (size_t at = 0; at < tensors.size(); at += kLayerTensors) {
    const Tensor *of = tensors.data() + at;
    layers.push_back({floats("input_norm", of[kInputNorm], {hidden}), floats_if_any("qkv_bias", of[kQkvBias], rows),
                      floats_if_any("query_norm", of[kQueryNorm], dim), floats_if_any("key_norm", of[kKeyNorm], dim),
                      floats("post_norm", of[kPostNorm], {hidden}), matrix("qkv", of + kQkvPacked, rows, hidden, group_size),
                      matrix("out", of + kOutPacked, hidden, heads * dim, group_size),
                      matrix("gate_up", of + kGateUpPacked, 2 * intermediate, hidden, group_size),
                      matrix("down", of + kDownPacked, hidden, intermediate, group_size)});
  }
  const DecoderShape shape = {hidden, heads, kv_heads, dim, intermediate, static_cast<float>(eps), static_cast<float>(scale)};
  all().emplace_back(std::move(tensors), final_norm, shape, std::move(layers));
  return static_cast<int64_t>(all().size()) - 1;
}

const int64_t *longs(const Tensor &tensor) { return static_cast<const int64_t *>(tensor.const_data_ptr()); }

Tensor step(int64_t decoder, Tensor x, Tensor positions, Tensor cos_sin, std::vector<Tensor> caches, Tensor slots,
            Tensor block_table, Tensor query_start, Tensor seq_lens) {
  STD_TORCH_CHECK(decoder >= 0 && decoder < static_cast<int64_t>(all().size()), "decoder: expected one of the ", all().size(),
                  " that were made, got ", decoder);
  Decoder &made = all()[decoder].decoder;
  const DecoderShape &shape = made.shape;
  expect("x", x, kCpu, ScalarType::Float, {-1, shape.hidden});
  const int64_t m = x.size(0);
  expect("positions", positions, kCpu, ScalarType::Long, {m});
  expect("cos_sin", cos_sin, kCpu, ScalarType::Float, {-1, shape.dim});
  expect("slots", slots, kCpu, ScalarType::Long, {m});
  const PagedRequests requests = paged_requests(block_table, query_start, seq_lens, m);
  STD_TORCH_CHECK(caches.size() == made.layers.size(), "caches: expected one for each of ", made.layers.size(), " layers, got ",
                  caches.size());
  STD_TORCH_CHECK(caches[0].dim() == 5, "caches: expected [pages, 2, kv_heads, page_size, D], got ", describe(caches[0]));
  const int64_t pages = caches[0].size(0), page_size = caches[0].size(3);
  expect_multiple("caches", "page_size", page_size, kPageUnit);
  std::vector<PagedCache> paged;
  for (const Tensor &cache : caches) {
    expect("caches", cache, kCpu, ScalarType::Float, {pages, 2, shape.kv_heads, page_size, shape.dim});
    auto *keys = static_cast<float *>(cache.mutable_data_ptr());
    const int64_t half = shape.kv_heads * page_size * shape.dim;
    paged.push_back({keys, keys + half, 2 * half, page_size});
  }
  expect_pages(requests, pages, page_size);
  const StepBatch batch = {m, requests, longs(positions), longs(slots), static_cast<const float *>(cos_sin.const_data_ptr())};
  for (int64_t t = 0; t < m; ++t) {
    STD_TORCH_CHECK(batch.positions[t] >= 0 && batch.positions[t] < cos_sin.size(0), "positions: expected below ", cos_sin.size(0),
                    ", got ", batch.positions[t]);
    STD_TORCH_CHECK(batch.slots[t] < pages * page_size, "slots: expected below ", pages * page_size, ", got ", batch.slots[t]);
  }
  Tensor y = torch::stable::new_empty(x, {m, shape.hidden});
  if (m > 0) {
    made.step(batch, paged, static_cast<float *>(x.mutable_data_ptr()), static_cast<float *>(y.mutable_data_ptr()));
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def(
      "decoder_make(Tensor[] tensors, Tensor final_norm, int group_size, int heads, int kv_heads, float eps, float scale) -> int");
  m.def(
      "decoder_step(int decoder, Tensor(a!) x, Tensor positions, Tensor cos_sin, Tensor(b!)[] caches, Tensor slots, Tensor "
      "block_table, Tensor query_start, Tensor seq_lens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("decoder_make", TORCH_BOX(&make));
  m.impl("decoder_step", TORCH_BOX(&step));
}
