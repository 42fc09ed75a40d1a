// The contract of the all-reduce ops. They exist on GPUs only.
//
//   all_reduce(x, to, from_, turns, rank, limit, late=None) -> y
//       y = the sum of all ranks' x, the same bits on every rank. x float16 or float32, any shape, contiguous, 16-byte aligned, at most
//       `largest` bytes, of one shape and dtype on all ranks. to: addresses of the slots that this rank writes; from_: by rank, of the
//       slots it reads, from_[rank] being ignored. turns int32 [`turns`] on x's GPU, all 1 at first, and belonging to these slots, as
//       the slots' memory is all 0 at first. Ranks make the same calls in the same order, each on one stream at a time.
//       limit: seconds of waiting for one rank, after which the GPU stops with an assertion that names the rank; with `late` int32 [1] on
//       x's GPU nothing stops: the rank's number + 1 goes there, and y is wrong.
//   all_reduce_rms_norm(x, residual, weight, eps, to, from_, turns, rank, limit, late=None) -> y
//       s = the sum of all ranks' x; without `turns` s = x, and `to`, `from_`, rank, limit and late are not used.
//       residual += s (in place), or s without one; y = residual / sqrt(mean(residual²) + eps) * weight, over the last dimension.
//       x, residual, y float16 [..., hidden], contiguous, 16-byte aligned; weight float16 [hidden]; hidden a multiple of 8 up to 16384.
//       Rounded as PyTorch operations one after another would: s, residual, the quotient, and y. Of ranks at most `rows` rows, and `largest`
//       bytes of x.
//   all_reduce_layout() -> (slot, turns, largest, rows)
//       Bytes of a slot, numbers of `turns`, most bytes of an x, most rows of a norm's.
//   map_host_memory(turns, address, bytes) -> int
//       Pins memory of this process and returns where the GPU of `turns` sees it. address and bytes: multiples of a page.
//   unmap_host_memory(turns, address) -> ()
//
// A bad argument raises RuntimeError naming it, what was expected and what came.
#pragma once
