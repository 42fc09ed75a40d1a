#!/usr/bin/env bash
# Resolves requirements/*.in into hash-locked requirements/*.lock, as of the date below. An unpinned install resolves
# newer packages, which the engine was never run with. Run by `make lock`.
set -euo pipefail
cd "$(dirname "$0")/../requirements"
export UV_PYTHON_DOWNLOADS=never  # resolving for a version needs no interpreter of it
UV=${UV:-../.venv/bin/uv}
AS_OF=2026-08-31
universal=(--exclude-newer "$AS_OF" --generate-hashes --no-emit-index-url --quiet --no-header --no-annotate
  --universal --python-version 3.10)
# torch and what only its CUDA build brings: locked apart (see torch.in).
torch_stack=(torch torchvision torchaudio triton cuda-bindings cuda-pathfinder
  nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime,cudnn,cufft,cufile,curand,cusolver,cusparse,cusparselt}-cu12
  nvidia-{nccl,nvjitlink,nvshmem,nvtx}-cu12)

"$UV" pip compile uv.in "${universal[@]}" -o uv.lock
"$UV" pip compile engine.in "${universal[@]}" --override overrides.txt --no-emit-package vllm "${torch_stack[@]/#/--no-emit-package=}" -o engine.lock
# What an override leaves out stays in the lock, marked `never`; such lines are dropped.
python3 - engine.lock <<'PYTHON'
import re, sys
path = sys.argv[1]
text = open(path).read()
kept = [entry for entry in re.split(r"(?m)^(?=[A-Za-z0-9])", text) if "'never'" not in entry.partition("\\")[0]]
open(path, "w").write("".join(kept))
PYTHON
grep '^vllm==' engine.in | "$UV" pip compile - "${universal[@]}" --no-deps -o vllm.lock
"$UV" pip compile torch.in "${universal[@]}" --constraint engine.lock -o torch.lock
"$UV" pip compile build.in "${universal[@]}" --constraint engine.lock -o build.lock
"$UV" pip compile dev.in "${universal[@]}" --constraint engine.lock -o dev.lock
"$UV" pip compile ray.in "${universal[@]}" --constraint engine.lock -o ray.lock
