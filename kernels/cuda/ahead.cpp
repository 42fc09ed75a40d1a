#include "ahead.h"

#include <algorithm>

namespace voltserve {

Ahead read_ahead(const Problem &next, const void *codes, const void *scales, size_t bytes) {
  if (next.m > kAheadTokens || next.experts > 0) return {};
  const Plan planned = plan(next);
  const Shape &block = shape(planned.variant);
  if (planned.path != Path::fused || block.rows != kAheadRowTiles * kTileRows || block.stage_tiles != kAheadColumnTiles) return {};

  Ahead ahead{};
  ahead.codes = static_cast<const unsigned char *>(codes);
  ahead.scales = static_cast<const unsigned char *>(scales);
  ahead.tile_rows = ceil_div(next.n, kTileRows);
  ahead.column_tiles = ceil_div(next.k, kTileColumns);
  ahead.scale_bytes = scale_bytes(next.group);
  ahead.stages = ceil_div(ahead.column_tiles, kAheadColumnTiles);
  const int units = planned.tiles * ahead.stages;
  ahead.share = units / planned.blocks;
  ahead.extra = units - ahead.share * planned.blocks;
  // Blocks that find no place at the start come later, to weights of which the L2 would have kept nothing.
  ahead.blocks = std::min(planned.blocks, next.processors * block.blocks_per_processor);
  const size_t stage = static_cast<size_t>(kAheadRowTiles * kAheadColumnTiles) * kTileRows * (kTileColumns / 2 + ahead.scale_bytes);
  const size_t all = stage * ahead.blocks;
  ahead.depth = static_cast<int>(std::min<size_t>((bytes + all / 2) / all, ahead.share + (ahead.extra > 0)));
  return ahead.depth > 0 ? ahead : Ahead{};
}

}  // namespace voltserve
