#include "cuda/linear/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "contracts/fp8.h"
#include "cuda/common/layout.cuh"
#include "cuda/common/layout8.cuh"

namespace voltserve {
namespace {

// As instantiated in mma*.cu; launch_tile() refuses to launch where the two disagree.
constexpr Shape kShapes[] = {
    {"mma2", 2, 64, 128, 4, 5},   {"mma4", 4, 64, 128, 4, 4},   {"mma8", 8, 64, 128, 4, 4},      {"mma16", 16, 64, 128, 4, 3},
    {"mma32", 32, 64, 128, 4, 2}, {"mma64", 64, 64, 128, 2, 2}, {"mma128", 128, 128, 128, 1, 2},
};

// Above this many tokens, dequantizing once and calling cuBLAS is faster than the fused kernel's inner loop.
//
// On a V100 this is computed. Others saw cuBLAS at 95 TFLOP/s, and dequantizing takes 3.4 ps per weight. By a count of its instructions
// the fused kernel reaches 74 TFLOP/s, which loses from M = 560 on (perfmodel/sass_model.py). With their waits it reaches at most 89-98,
// which loses from M = 2400 on (perfmodel/sass_schedule.py). After Volta the limit is much lower, since only a quarter of the fused
// kernel's multiplications count (mma.cuh).
// FP8 has no block of 128 tokens (below). At the 70 TFLOP/s of blocks of 64, by the same count, it loses from M = 452 on.
constexpr int kFusedTokens = 768, kFusedTokensFp8 = 448, kFusedTokensAfterVolta = 32;
// With more tiles than this per resident block, one block per tile balances well enough, and no tile is shared.
constexpr int kWavesUnshared = 4;
// A range of fewer stages costs more in latency and in adding up than another block gains.
constexpr int kMinStages = 2;

int most_fused(const Problem &p) {
  return p.arch >= 80 ? kFusedTokensAfterVolta : is_fp8(p.group) ? kFusedTokensFp8 : kFusedTokens;
}

Variant choose_variant(const Problem &p) {
  if (p.experts > 0) {
    // Slots spread over experts, so blocks of few tokens waste least on padding.
    const int per_expert = ceil_div(p.m, p.experts);
    return per_expert <= 8 ? Variant::mma8 : per_expert <= 16 ? Variant::mma16 : per_expert <= 32 ? Variant::mma32 : Variant::mma64;
  }
  // With twice the codes of NVFP4 in registers, blocks of 2 and of 128 tokens would spill at their planned occupancy.
  if (p.m <= 2 && !is_fp8(p.group)) return Variant::mma2;
  if (p.m <= 4) return Variant::mma4;
  if (p.m <= 8) return Variant::mma8;
  if (p.m <= 16) return Variant::mma16;
  if (p.m <= 32) return Variant::mma32;
  return p.m <= 64 || is_fp8(p.group) ? Variant::mma64 : Variant::mma128;
}

// Sets the grid for the plan's variant over `token_blocks` blocks of tokens.
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
  expect(p.group == 16 || p.group == 32 || is_fp8(p.group), "group", "16 or 32, or for FP8 0 or 128", p.group);
  const int multiple = is_fp8(p.group) ? kFp8Columns : p.group;
  expect(p.k > 0 && p.k % multiple == 0, "k", "a multiple of " + std::to_string(multiple), p.k);
  expect(p.arch >= 70, "arch", "70 or more", p.arch);
  expect(p.processors > 0, "processors", "at least 1", p.processors);

  Plan plan{};
  plan.variant = choose_variant(p);
  if (p.experts == 0 && p.m > most_fused(p)) {
    plan.path = Path::dequantize;
    plan.reason = "many tokens: each weight is used often enough to dequantize tile by tile and call cuBLAS";
    return plan;
  }
  // At worst every expert with slots wastes most of a block.
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
