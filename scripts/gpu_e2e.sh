#!/usr/bin/env bash
# Runs the overlay end to end on a GPU machine that has Python 3.12 and a torch of its own, from what scripts/gpu_e2e/pack.py
# made here (build/gpu_e2e/): the launcher, HTTP, vLLM, our kernels. A GPU that is no V100 is treated as one
# (VOLTSERVE_FORCE_VOLTA); its speed is its own, and mma.m8n8k4, with which a V100 multiplies 2 to 1024 tokens, is emulated
# after Volta. Results go to $OUT/results.tar.xz (default: build/gpu_e2e/out/), renewed after each step; each step has a time limit.
# Usage: gpu_e2e.sh STEP…     small | moe | answers | speed | hybrid
set -uo pipefail
cd "$(dirname "$0")/.."
ARCHIVE=${OUT:-$PWD/build/gpu_e2e/out}/results.tar.xz
WORK=${WORK:-/tmp/gpu_e2e}
OUT=$WORK/out
PACK=build/gpu_e2e
source scripts/gpu_e2e/environment.sh
# Parts of the model may come with different calls.
cp -u $PACK/model.0? "$WORK/" 2>/dev/null
SHM=/dev/shm/gpu_e2e

# Whether everything can be imported, and what an eager step of a small model is made of.
small() {
  step 90 import python3 -c 'import torch, voltserve_kernels; print(torch.__version__, voltserve_kernels.devices())
from vllm.platforms import current_platform as p; print(type(p), p.get_device_capability())
from engine import launcher' || return 1
  step 30 small-model python3 scripts/gpu_e2e/synthetic.py smollm2 "$WORK/small" --device cuda
  step 150 small-speed python3 scripts/gpu_e2e/measure.py "$WORK/small" "$OUT/small.json" --memory 0.1 --streams 1 4
  grep "'way'" "$OUT/small-speed.log"
}

model() {
  [[ -f $WORK/model/model.safetensors ]] && return 0
  mkdir -p "$WORK/model" && step 60 unpack python3 scripts/gpu_e2e/unpack.py "$WORK" "$WORK/model"
}

# ask NAME MODEL FLAG…: an engine answers the fixed questions, through HTTP. The cache's size is given, since engines that start side by
# side would take each other's memory for their own when they look how much is left.
ask() {
  local name=$1 model=$2; shift 2
  step 150 "$name" python3 scripts/gpu_e2e/answers.py --questions $PACK/questions.json "$model" "$OUT/$name.json" --dtype float16 \
    --max-model-len 2048 --max-num-seqs 32 --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 2147483648 "$@"
}

# The real model eagerly, in graphs, and in graphs that compute something else, which the start-up check must notice.
answers() {
  model || return 1
  ask eager "$WORK/model" --enforce-eager &
  ask graphs "$WORK/model" &
  ask faulty "$WORK/model" --worker-extension-cls faulty.FaultyGraphs &
  wait
}

# A mixture of experts that a CPU can run, too.
moe() {
  step 60 moe-model python3 scripts/gpu_e2e/synthetic.py moe "$WORK/moe" && cp $PACK/tokenizer/* "$WORK/moe/" || return 1
  ask moe "$WORK/moe"
}

# Qwen3-32B's shapes: tokens a second, against dequantizing on every call and against reading the weights.
speed() {
  mkdir -p "$SHM/qwen3-32b" && step "${SPEED_LIMIT:-280}" big-speed python3 scripts/gpu_e2e/measure.py "$SHM/qwen3-32b" "$OUT/big.json" \
    --make qwen3-32b --tokens 32 --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'" "$OUT/big-speed.log"
  rm -rf "$SHM"
}

# The 27B with Gated DeltaNet layers, text only: as `speed`. LAYERS=8 for a short trial.
hybrid() {
  step 120 hybrid-model python3 scripts/gpu_e2e/synthetic_hybrid.py "$SHM/qwen3.8-27b" --layers "${LAYERS:-64}" --device cuda || return 1
  step "${SPEED_LIMIT:-280}" hybrid-speed python3 scripts/gpu_e2e/measure.py "$SHM/qwen3.8-27b" "$OUT/hybrid.json" --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'\|largest" "$OUT/hybrid-speed.log"
  rm -rf "$SHM"
}

for name in "$@"; do
  "$name"
  tar cJf "$ARCHIVE" -C "$OUT" .
done
