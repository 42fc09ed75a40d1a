// The contract of the all-reduce ops. They exist on GPUs only.
//
//   all_reduce(x, to, from_, epochs, rank, limit, late=None) -> y
//       y is the sum of all ranks' x, with the same bits on every rank.
//       x       float16 or float32, any shape, contiguous, 16-byte aligned, at most `largest` bytes; one shape and dtype on all ranks
//       to      addresses of the slots that this rank writes
//       from_   by rank, addresses of the slots that it reads; from_[rank] is ignored
//       epochs  int32 [`epochs`] on x's GPU, all 1 at first. They belong to these slots, whose memory is all 0 at first.
//       limit   seconds to wait for one rank. Then the GPU stops with an assertion that names the rank.
//       late    int32 [1] on x's GPU: instead of stopping, the late rank's number + 1 is written here, and y is wrong.
//       Ranks make the same calls in the same order, each on one stream at a time.
//   all_reduce_rms_norm(x, residual, weight, eps, to, from_, epochs, rank, limit, late=None) -> y
//       s is the sum of all ranks' x. Without `epochs` s = x, and to, from_, rank, limit and late are not used.
//       residual += s (in place), or residual = s where none is given.
//       y = residual / sqrt(mean(residual^2) + eps) * weight, over the last dimension.
//       x, residual and y are float16 [..., hidden], contiguous, 16-byte aligned; weight is float16 [hidden]; hidden is a multiple of 8
//       up to 16384. Rounding is that of separate PyTorch operations: s, residual, the quotient, and y.
//       With ranks, at most `rows` rows and `largest` bytes of x.
//   all_reduce_layout() -> (slot, epochs, largest, rows)
//       Bytes per slot, length of `epochs`, most bytes of x, most rows of a norm.
//   map_host_memory(epochs, address, bytes) -> int
//       Pins memory of this process and returns its address for the GPU of `epochs`. address and bytes are multiples of a page.
//   unmap_host_memory(epochs, address) -> ()
//
// A bad argument raises RuntimeError with its name, what was expected and what was given.
#pragma once
