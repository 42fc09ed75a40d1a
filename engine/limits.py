"""What the kernels of voltserve_kernels take, each limit with the source that sets it. Standard library only.

Python checks these limits before it chooses a kernel. The kernels check them again when they are called.
"""

# Attention: kernels/cuda/attention/plan.cpp. Dimensions of a head.
HEAD_SIZES = (64, 80, 96, 128, 256)
# kernels/cuda/attention/plan.h: requests with more new tokens than this are computed on tensor cores.
DECODE_TOKENS = 8
# kernels/contracts/attention.h, rotate_and_cache: dimensions of a head, and of what is rotated of it.
MAX_ROTATED_HEAD, ROTATED_HEAD_MULTIPLE, ROTATED_MULTIPLE = 256, 8, 4

# RMS norm with all-reduce: kernels/cuda/norm/args.h. The width of a row.
NORM_MULTIPLE, NORM_MAX = 8, 16384

# silu_and_mul: gate and up are each read 16 bytes at a time.
SILU_MULTIPLE = 16

# Gated DeltaNet: kernels/contracts/gdn.h. Tokens that the convolution covers.
CONV_TAPS = 4

# Experts: kernels/cuda/linear/plan.cpp. Slots per block.
EXPERT_BLOCKS = (8, 16, 32, 64)

# linear16 on CPUs: K is a multiple of this.
LINEAR16_MULTIPLE = 16

# Attention and decoder_step on CPUs: kernels/contracts/attention.h. Dimensions of a head, and positions of a page.
DECODER_HEAD_MULTIPLE, DECODER_MAX_HEAD = 32, 256
PAGE_MULTIPLE = 16
