// A decoding step of all decoder layers on the CPU (contracts/decoder.h).
#pragma once

#include <mutex>
#include <vector>

#include "contracts/decoder.h"
#include "cpu/attention.h"

namespace voltserve::cpu {

// The layers of one model, and the memory for intermediate results of a step.
class Decoder {
 public:
  Decoder(DecoderShape shape, std::vector<DecoderLayer> layers, const float *final_norm)
      : shape(shape), layers(std::move(layers)), final_norm_(final_norm) {}

  // From x [batch.tokens, hidden], which is overwritten, to y of the same shape. One cache per layer; one step at a time.
  void step(const StepBatch &batch, const std::vector<PagedCache> &caches, float *x, float *y);

  const DecoderShape shape;
  const std::vector<DecoderLayer> layers;

 private:
  struct Buffers;

  void attention(const DecoderLayer &layer, const StepBatch &batch, const PagedCache &cache, PagedAttention &attention,
                 Buffers &buffers);

  const float *final_norm_;
  std::mutex busy_;
  std::vector<float> room_;  // grows to the size of the largest step
};

}  // namespace voltserve::cpu
