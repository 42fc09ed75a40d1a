#include "cuda/linear/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/common/layout.cuh"

namespace voltserve {
namespace {

// As instantiated in linear_mma*.cu; launch_tile() refuses to launch where the two disagree.
constexpr Shape kShapes[] = {
    {"mma2", 2, 64, 128, 4, 5},   {"mma4", 4, 64, 128, 4, 4},   {"mma8", 8, 64, 128, 4, 4},       {"mma16", 16, 64, 128, 4, 3},
    {"mma32", 32, 64, 128, 4, 2}, {"mma64", 64, 64, 128, 2, 2}, {"mma128", 128, 128, 128, 1, 2},
};

// Above this many tokens, dequantizing once and calling cuBLAS costs less than the fused kernel's slower inner loop. On a V100 that is
// computed: others saw cuBLAS at 95 TFLOP/s, and a weight takes 3.4 ps to dequantize; the fused kernel does 74 by a count of its
// instructions (perfmodel/sass_model.py: from M = 560 on), at most 89-98 by their waits (perfmodel/sass_schedule.py: from M = 2400 on). Much
// earlier after Volta, where a quarter of the fused kernel's multiplications count (mma.cuh).
constexpr int kFusedTokens = 768, kFusedTokensAfterVolta = 32;
// With more tiles than this for each place on the GPU, blocks of one tile each balance well enough and share nothing.
constexpr int kWavesUnshared = 4;
// A shorter run than this many stages costs more in latency and in adding up than another block gains.
constexpr int kMinStages = 2;

Variant choose_variant(const Problem &p) {
  if (p.experts > 0) {
    // Slots spread over experts; a block of few tokens wastes least on padding.
    const int per_expert = ceil_div(p.m, p.experts);
    return per_expert <= 8 ? Variant::mma8 : per_expert <= 16 ? Variant::mma16 : per_expert <= 32 ? Variant::mma32 : Variant::mma64;
  }
  if (p.m <= 2) return Variant::mma2;
  if (p.m <= 4) return Variant::mma4;
  if (p.m <= 8) return Variant::mma8;
  if (p.m <= 16) return Variant::mma16;
  if (p.m <= 32) return Variant::mma32;
  return p.m <= 64 ? Variant::mma64 : Variant::mma128;
}

// The grid of the plan's variant over `token_blocks` blocks of tokens.
void share_out(Plan &plan, const Problem &p, int token_blocks) {
  const Shape &s = shape(plan.variant);
  plan.path = Path::fused;
  const int stages = ceil_div(ceil_div(p.k, kTileColumns), s.stage_tiles);
  plan.tiles = ceil_div(p.n, s.rows) * token_blocks;
  const int places = p.processors * s.blocks_per_processor;
  plan.blocks = plan.tiles >= kWavesUnshared * places ? plan.tiles : std::clamp(plan.tiles * stages / kMinStages, 1, places);
  if (plan.blocks != plan.tiles || p.experts > 0) {
    plan.workspace_words = static_cast<size_t>(plan.blocks) * 2 * s.tokens * s.rows;
  }
  plan.reason = s.tokens <= 16 ? "bound by reading the weights; tensor cores keep up where CUDA cores do not"
                               : "weights are dequantized in registers on the way to the tensor cores";
}

}  // namespace

const Shape &shape(Variant variant) { return kShapes[static_cast<int>(variant)]; }

Plan plan(const Problem &p) {
  auto expect = [](bool fits, const char *name, const std::string &expected, int got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  expect(p.m > 0, "m", "at least 1", p.m);
  expect(p.n > 0, "n", "at least 1", p.n);
  expect(p.group == 16 || p.group == 32, "group", "16 or 32", p.group);
  expect(p.k > 0 && p.k % p.group == 0, "k", "a multiple of the group", p.k);
  expect(p.arch >= 70, "arch", "70 or more", p.arch);
  expect(p.processors > 0, "processors", "at least 1", p.processors);

  Plan plan{};
  plan.variant = choose_variant(p);
  if (p.experts == 0 && p.m > (p.arch < 80 ? kFusedTokens : kFusedTokensAfterVolta)) {
    plan.path = Path::dequantize;
    plan.reason = "many tokens: each weight is used often enough to dequantize tile by tile and call cuBLAS";
    return plan;
  }
  // Grouped: at worst, every expert that has slots wastes most of a block's.
  const int tokens = shape(plan.variant).tokens;
  share_out(plan, p, p.experts == 0 ? ceil_div(p.m, tokens) : p.m / tokens + std::min(p.m, p.experts));
  return plan;
}

Plan plan_grouped(const Problem &p, int block, int token_blocks) {
  for (const Variant variant : {Variant::mma8, Variant::mma16, Variant::mma32, Variant::mma64}) {
    if (shape(variant).tokens != block) continue;
    Plan grouped = plan(p);
    grouped.variant = variant;
    share_out(grouped, p, token_blocks);
    return grouped;
  }
  throw std::invalid_argument("slots: expected blocks of 8, 16, 32 or 64 slots, got " + std::to_string(block));
}

}  // namespace voltserve
