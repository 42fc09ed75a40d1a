#!/usr/bin/env bash
# Tensor parallelism on a machine with two GPUs, from what scripts/gpu_tp2/prepare.py and scripts/gpu_e2e/pack.py made here (build/gpu_tp2/,
# build/gpu_e2e/). Steps: the doctor's probes, greedy texts of small models in several formats on one and two ranks, all-reduces, and tokens
# per second of Qwen3-32B's shapes. Each NCCL step runs by peer memory and by shared memory (NCCL_P2P_DISABLE=1). Results go to
# $OUT/tp2.tar.xz (default: build/gpu_tp2/out/), renewed after each step.
# Usage: gpu_tp2.sh STEP…     probes | texts | reduce | speed     WAYS=…: for texts (scripts/gpu_tp2/prepare.py)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
ARCHIVE=${OUT:-$PWD/build/gpu_tp2/out}/tp2.tar.xz
WORK=${WORK:-/tmp/gpu_e2e}
OUT=$WORK/tp2
PACK=build/gpu_e2e
BIG=/dev/shm/gpu_e2e/qwen3-32b  # gpu_e2e.sh's
# shellcheck source=scripts/gpu_e2e/environment.sh
source scripts/gpu_e2e/environment.sh
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0
DEVICE=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)

# What `voltserve doctor` tries out, for real.
probes() {
  step 20 topology nvidia-smi topo -m
  step 90 p2p python3 -m engine.probes.p2p && tail -n 1 "$OUT/p2p.log"
  step 90 all-reduce python3 -m engine.probes.all_reduce && tail -n 1 "$OUT/all-reduce.log"
  NCCL_P2P_DISABLE=1 step 90 all-reduce-shared python3 -m engine.probes.all_reduce && tail -n 1 "$OUT/all-reduce-shared.log"
}

# Every way in three processes, all side by side, with the models one after another: most of the time is starting. The jobs write
# beside the CPU's answers, wherever this folder is here.
texts() {
  local ways=${WAYS:-one one-not-recorded peer shared shared-graphs own own-graphs} way part
  mkdir -p "$OUT/answers" && cp build/gpu_tp2/*.cpu.json "$OUT/answers/" || return 1
  for way in $ways; do
    for part in 0 1 2; do
      python3 -c 'import json, sys
folder, way, part = sys.argv[1:]
jobs = json.load(open(f"build/gpu_tp2/jobs.{way}.json"))[int(part)::3]
json.dump([job | {"output": folder + "/" + job["output"]} for job in jobs], open(f"{folder}/jobs.{way}.{part}.json", "w"))' "$OUT/answers" "$way" $part
      VLLM_ENABLE_V1_MULTIPROCESSING=0 step "${TEXTS_LIMIT:-240}" "texts-$way-$part" python3 -m scripts.gpu_tp2.greedy "$OUT/answers/jobs.$way.$part.json" &
    done
  done
  wait
  # shellcheck disable=SC2086  # ways are words
  python3 -m scripts.gpu_tp2.judge "$OUT/answers" "$OUT/texts.json" $ways --device "$DEVICE"
}

# Ours beside NCCL's, both ways.
reduce() {
  step 150 reduce python3 -m scripts.gpu_tp2.reduce "$OUT/reduce.json" --sweep "$WORK/site/libvoltserve_cuda.so"
  tail -n 2 "$OUT/reduce.log" | cut -c1-2000
}

# mma.m8n8k4, with which a V100 multiplies 2 to 1024 tokens, is emulated after Volta: rates above one stream are no V100's.
# As it is served, with the model's modules, and with NCCL's all-reduces. One engine is for shared memory, one for peer memory. Then eager
# steps, recorded and not.
# shellcheck disable=SC2086  # ways are words
speed_shared() { NCCL_P2P_DISABLE=1 speed_of speed-shared --only-graphs --ways ${SPEED_WAYS:-kernels unfused nccl}; }
# shellcheck disable=SC2086  # ways are words
speed_peer() { speed_of speed-peer --only-graphs --ways ${SPEED_WAYS:-kernels unfused nccl}; }
speed_eager() { NCCL_P2P_DISABLE=1 speed_of speed-eager --eager --ways kernels; }
speed() { speed_shared && speed_peer && speed_eager; }
# speed_of NAME FLAG…
speed_of() {
  local name=$1 make=(--make qwen3-32b); shift
  [[ -f $BIG/config.json ]] && make=()
  step "${SPEED_LIMIT:-200}" "$name" python3 -m scripts.gpu_e2e.measure "$BIG" "$OUT/$name.json" "${make[@]}" --ranks 2 --tokens "${TOKENS:-32}" "$@"
  grep "'way'" "$OUT/$name.log"
}

for name in "$@"; do
  "$name"
  tar cJf "$ARCHIVE" -C "$OUT" .
done
