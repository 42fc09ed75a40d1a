#!/usr/bin/env bash
# Builds our kernels with the V100's machine code as a wheel in FOLDER: for `make kernels-cuda`, scripts/setup.sh and the
# Dockerfile. Needs no GPU. PYTHON has the torch to compile against: the default index's, whose headers and libraries
# know CUDA. The compiler is fetched where there is none. Usage: cuda_wheel.sh PYTHON FOLDER
set -euo pipefail
python=$(realpath --no-symlinks "${1:?usage: cuda_wheel.sh PYTHON FOLDER}") folder=$(realpath "${2:?usage: cuda_wheel.sh PYTHON FOLDER}")
cd "$(dirname "$0")/.."
CUDA_HOME=$(scripts/fetch_nvcc.sh)
export CUDA_HOME VOLTSERVE_CUDA_OBJECTS=$PWD/build/cuda
scripts/build_cuda.sh
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" ./kernels
