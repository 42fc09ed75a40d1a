#!/usr/bin/env bash
# Resolves requirements/*.in into hash-locked requirements/*.lock, as of the date below (facts of the day: an
# unpinned install resolves newer packages that vLLM 0.19.1 was never run with). Run by `make lock`.
set -euo pipefail
cd "$(dirname "$0")/../requirements"
export UV_PYTHON_DOWNLOADS=never  # resolving for a version needs no interpreter of it
UV=${UV:-../.venv/bin/uv}
AS_OF=2026-05-01
common=(--exclude-newer "$AS_OF" --generate-hashes --no-emit-index-url --quiet --no-header --no-annotate)
universal=("${common[@]}" --universal --python-version 3.10)
# torch and what only its CUDA build brings: locked apart (see torch.in).
torch_stack=(torch torchvision torchaudio triton cuda-bindings cuda-pathfinder
  nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime,cudnn,cufft,cufile,curand,cusolver,cusparse,cusparselt}-cu12
  nvidia-{nccl,nvjitlink,nvshmem,nvtx}-cu12)

"$UV" pip compile uv.in "${universal[@]}" -o uv.lock
"$UV" pip compile cpu.in "${universal[@]}" --override overrides.txt "${torch_stack[@]/#/--no-emit-package=}" -o cpu.lock
"$UV" pip compile torch.in "${universal[@]}" --constraint cpu.lock -o torch.lock
"$UV" pip compile dev.in "${universal[@]}" --constraint cpu.lock -o dev.lock
"$UV" pip compile ray.in "${universal[@]}" --constraint cpu.lock -o ray.lock
"$UV" pip compile gpu.in "${universal[@]}" -o gpu.lock
