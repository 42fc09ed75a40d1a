#!/usr/bin/env bash
# Installs torch for the CPU engine into VIRTUAL_ENV, with the uv given: for scripts/setup.sh and the Dockerfile.
# torch's CPU build is 180 MB and is only on the PyTorch index. The default index's build brings CUDA's libraries (7 GB
# on disk) and runs the same on a CPU. The CPU build's hashes are not locked, since that index did not answer where the
# locks were made. Its version is exact. Usage: VIRTUAL_ENV=DIR install_torch_cpu.sh UV
set -euo pipefail
uv=$(realpath "$1")
cd "$(dirname "$0")/.."
cpu_build=(torch==2.10.0+cpu torchvision==0.25.0+cpu torchaudio==2.10.0+cpu)

# TORCH_CPU_INDEX: a mirror of the PyTorch index's CPU builds, instead of the one that uv knows.
from=(--torch-backend cpu)
[[ -n ${TORCH_CPU_INDEX:-} ]] && from=(--index "$TORCH_CPU_INDEX")

if timeout 60 "$uv" pip install --quiet --dry-run --no-deps "${from[@]}" "${cpu_build[@]}" 2>/dev/null; then
  echo "torch: the CPU build, since the PyTorch index answers"
  "$uv" pip install --quiet --compile-bytecode "${from[@]}" "${cpu_build[@]}"
else
  echo "torch: the default index's CUDA build, since the PyTorch index does not answer (7 GB on disk)"
  "$uv" pip install --quiet --no-deps --require-hashes --compile-bytecode -r requirements/torch.lock
fi
