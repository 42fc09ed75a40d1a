#!/usr/bin/env bash
# Removes from the GPU image's environment what no V100 can run and what nothing links. Runs in the layer that installed
# it. Fails where an entry matches nothing, so that an upgrade that moves one is noticed. Usage: docker_prune.sh VENV
set -euo pipefail
venv=${1:?usage: docker_prune.sh VENV}
cd "$venv"/lib/python3*/site-packages

files=(
  # Triton's assembler for Blackwell; CUPTI for its profiler.
  triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/lib/cupti
  # Libraries that nothing links: torch takes none of these (readelf -d).
  nvidia/cusolver/lib/libcusolverMg.so.11 'nvidia/cuda_nvrtc/lib/libnvrtc*.alt.so.*'
  # To build against, not to run.
  xgrammar/lib 'nvidia/nvshmem/lib/libnvshmem_device.*' 'cuda/bindings/*.cpp' 'torch/bin/protoc*'
  # Tests of packages.
  {numba,numba/cuda,matplotlib,supervisor}/tests 'sympy/*/tests' 'networkx/*/tests'
)

before=$(du -sm . | cut -f1)
for pattern in "${files[@]}"; do
  compgen -G "$pattern" >/dev/null || { echo "docker_prune: expected $pattern in $PWD, found nothing" >&2; exit 1; }
  # shellcheck disable=SC2086  # a pattern
  rm -r $pattern
done
echo "docker_prune: $before MiB became $(du -sm . | cut -f1)"
