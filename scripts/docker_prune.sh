#!/usr/bin/env bash
# Takes out of the GPU image's environment what vLLM's wheels bring and no V100 can run or nothing links: 2.4 of 11 GB, in the
# layer that installed it. Fails where an entry matches nothing, so that an upgrade that moves one is noticed. Usage:
# docker_prune.sh VENV
set -euo pipefail
venv=${1:?usage: docker_prune.sh VENV}
cd "$venv"/lib/python3*/site-packages

# Kernels for compute capability 7.5 and newer, and their compilers. vLLM imports none of them where the GPU is older.
packages=(flashinfer-cubin flashinfer-python nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base quack-kernels nvidia-cudnn-frontend)

files=(
  # Attention for 8.0 and newer. vLLM wants one of FlashAttention 2 and 3 to be importable; 3 is the smaller.
  vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so 'vllm/_flashmla*_C.abi3.so'
  # Triton's assembler for Blackwell; CUPTI for its profiler.
  triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/lib/cupti
  # Libraries that nothing links: torch takes none of these (readelf -d).
  nvidia/cusolver/lib/libcusolverMg.so.11 'nvidia/cuda_nvrtc/lib/libnvrtc*.alt.so.*'
  # To build against, not to run.
  xgrammar/lib 'nvidia/nvshmem/lib/libnvshmem_device.*' 'cuda/bindings/*.cpp' 'torch/bin/protoc*'
  # Tests of packages.
  {numba,numba/cuda,matplotlib,supervisor}/tests 'sympy/*/tests' 'networkx/*/tests'
)

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
before=$(du -sm . | cut -f1)
"$venv/bin/python" -m pip uninstall --quiet --yes --root-user-action=ignore "${packages[@]}"
for package in "${packages[@]}"; do
  "$venv/bin/python" -m pip show --quiet "$package" 2>/dev/null && { echo "docker_prune: $package is still installed" >&2; exit 1; }
done
for pattern in "${files[@]}"; do
  compgen -G "$pattern" >/dev/null || { echo "docker_prune: expected $pattern in $PWD, found nothing" >&2; exit 1; }
  # shellcheck disable=SC2086  # a pattern
  rm -r $pattern
done
echo "docker_prune: $before MiB became $(du -sm . | cut -f1)"
