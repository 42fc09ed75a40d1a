// Checks of a batch of requests over a paged cache on the CPU. Wrong indexes would read and write anywhere in memory.
#pragma once

#include "bindings/arguments.h"
#include "contracts/decoder.h"

namespace voltserve {

inline PagedRequests paged_requests(const Tensor &block_table, const Tensor &query_start, const Tensor &seq_lens, int64_t tokens) {
  expect("seq_lens", seq_lens, kCpu, ScalarType::Int, {-1});
  const int64_t count = seq_lens.size(0);
  expect("query_start", query_start, kCpu, ScalarType::Int, {count + 1});
  expect("block_table", block_table, kCpu, ScalarType::Int, {count, -1});
  const auto ints = [](const Tensor &tensor) { return static_cast<const int32_t *>(tensor.const_data_ptr()); };
  const PagedRequests requests = {count, block_table.size(1), ints(block_table), ints(query_start), ints(seq_lens)};
  STD_TORCH_CHECK(requests.query_start[0] == 0 && requests.query_start[count] == tokens, "query_start: expected 0 to ", tokens,
                  ", got ", requests.query_start[0], " to ", requests.query_start[count]);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t added = requests.query_start[r + 1] - requests.query_start[r];
    STD_TORCH_CHECK(added >= 0 && requests.seq_lens[r] >= added, "seq_lens: expected at least the ", added,
                    " tokens of the step, got ", requests.seq_lens[r], " at [", r, "]");
  }
  return requests;
}

inline void expect_pages(const PagedRequests &requests, int64_t pages, int64_t page_size) {
  for (int64_t r = 0; r < requests.count; ++r) {
    const int64_t used = (requests.seq_lens[r] + page_size - 1) / page_size;
    STD_TORCH_CHECK(used <= requests.pages_each, "block_table: expected ", used, " pages for ", requests.seq_lens[r],
                    " positions, got ", requests.pages_each);
    for (int64_t p = 0; p < used; ++p) {
      const int32_t page = requests.block_table[r * requests.pages_each + p];
      STD_TORCH_CHECK(page >= 0 && page < pages, "block_table: expected 0 to ", pages - 1, ", got ", page);
    }
  }
}

}  // namespace voltserve
