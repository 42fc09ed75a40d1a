#!/usr/bin/env bash
# Installs the GPU engine's packages into VIRTUAL_ENV, with the uv given: for scripts/setup.sh and the Dockerfile.
# torch is the default index's build for CUDA 12.8, the last with sm_70 machine code. 11 GB on disk with all it brings.
# Usage: VIRTUAL_ENV=DIR install_gpu.sh UV [-r MORE.lock]...
set -euo pipefail
uv=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
"$uv" pip install --quiet --no-deps --require-hashes --compile-bytecode -r requirements/gpu.lock "$@"
"$uv" pip check --quiet
