#!/usr/bin/env bash
# Runs the overlay end to end on a GPU machine that has Python 3.12 and a torch of its own, from what scripts/gpu_e2e/pack.py
# made here (build/gpu_e2e/): the launcher, HTTP, vLLM, our kernels. A GPU that is no V100 is treated as one
# (VOLTSERVE_FORCE_VOLTA); its speed is its own, and mma.m8n8k4, with which a V100 multiplies 2 to 1024 tokens, is emulated
# after Volta. Results go to $OUT/results.tar.xz (default: build/gpu_e2e/out/), renewed after each step; each step has a time limit.
# Usage: gpu_e2e.sh STEP…     small | moe | answers | speed | eager_speed | hybrid | hybrid_eager |
#   long_context | clean
# Large models stay in the machine's memory, where another step may want them; `clean` removes them.
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
DEVICE="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1); our kernels from compute_70 PTX"

# eager NAME MODEL FLAG…: the default preset's steps, recorded and not.
eager() {
  local name=$1 model=$2; shift 2
  step "${SPEED_LIMIT:-150}" "$name" python3 scripts/gpu_e2e/measure.py "$model" "$OUT/$name.json" --eager --ways kernels "$@"
  grep "'way'" "$OUT/$name.log"
}

# What an eager step of a small model is made of.
small_model() { [[ -d $WORK/small ]] || step 30 small-model python3 scripts/gpu_e2e/synthetic.py smollm2 "$WORK/small"; }
small() { small_model && eager small "$WORK/small" --memory 0.1 --cache-bytes 2147483648 --streams 1 8; }

model() { [[ -d $WORK/small ]] || step 30 small-model python3 scripts/gpu_e2e/synthetic.py smollm2 "$WORK/small"; }
SMALL=(--memory 0.1 --cache-bytes 2147483648 --streams 1 8)
small() { small_model && eager small "$WORK/small" "${SMALL[@]}"; }
small_not_recorded() { small_model && not_recorded small-not-recorded "$WORK/small" "${SMALL[@]}"; }

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

# agree REFERENCE OTHER WHAT: compares two engines' answers.
agree() {
  python3 scripts/gpu_e2e/compare.py "$1" "$OUT/$2.json" "$OUT/$2-compared.json" --what "$3" --device "$DEVICE" \
    --command "scripts/gpu_e2e.sh ${FUNCNAME[1]}" && echo "[$2] agrees" || echo "[$2] DIFFERS"
}

# The real model eagerly, recorded and not, in graphs, and in graphs that compute something else, which the start-up check must
# notice; beside what answers.py got from the CPU engine ($PACK/cpu.json).
answers() {
  model || return 1
  ask eager "$WORK/model" --enforce-eager &
  TORCH_COMPILE_DISABLE=1 ask not-recorded "$WORK/model" --enforce-eager &
  ask graphs "$WORK/model" &
  ask triton "$WORK/model" --enforce-eager --attention-backend TRITON_ATTN &
  ask faulty "$WORK/model" --worker-extension-cls faulty.FaultyGraphs &
  wait
  for way in eager not-recorded graphs; do
    agree $PACK/cpu.json $way "SmolLM2-135M in NVFP4: the CPU engine's answers in float32 and the GPU engine's, $way"
  done
  agree "$OUT/eager.json" triton "SmolLM2-135M in NVFP4: answers with our attention and with Triton's"
}

# A random mixture of experts, eagerly and in graphs, beside its dequantized twin on vLLM's own kernels.
moe() {
  for model in moe moe-twin; do
    step 60 $model-model python3 scripts/gpu_e2e/synthetic.py moe "$WORK/$model" $([[ $model == moe ]] || echo --twin) --device cuda && cp $PACK/tokenizer/* "$WORK/$model/" || return 1
  done
  ask moe-twin "$WORK/moe-twin" --enforce-eager &
  ask moe-eager "$WORK/moe" --enforce-eager &
  ask moe-graphs "$WORK/moe" &
  wait
  for way in moe-eager moe-graphs; do
    agree "$OUT/moe-twin.json" $way "a random mixture of 16 experts: its dequantized twin on vLLM's kernels, and NVFP4 on ours, ${way#moe-}"
  done
}

# Qwen3-32B's shapes: tokens a second, against dequantizing on every call and against reading the weights.
BIG=$SHM/qwen3-32b
big_model() { [[ -f $BIG/config.json ]] || step 120 big-model python3 scripts/gpu_e2e/synthetic.py qwen3-32b "$BIG" --device cuda; }
speed() {
  big_model && step "${SPEED_LIMIT:-280}" big-speed python3 scripts/gpu_e2e/measure.py "$BIG" "$OUT/big.json" \
    --tokens 32 --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'" "$OUT/big-speed.log"
}

# Its eager steps.
eager_speed() { big_model && eager big-eager "$BIG" --tokens 32; }

# The 27B with Gated DeltaNet layers, text only: as `speed`. LAYERS=8 for a short trial.
HYBRID=$SHM/qwen3.8-27b
hybrid_model() {
  [[ -f $HYBRID/config.json ]] ||
    step 120 hybrid-model python3 scripts/gpu_e2e/synthetic_hybrid.py "$HYBRID" --layers "${LAYERS:-64}" --device cuda
}
hybrid() {
  hybrid_model && step "${SPEED_LIMIT:-280}" hybrid-speed python3 scripts/gpu_e2e/measure.py "$HYBRID" "$OUT/hybrid.json" \
    --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'\|largest" "$OUT/hybrid-speed.log"
}

# Its eager steps.
hybrid_eager() { hybrid_model && eager hybrid-eager "$HYBRID" --tokens 32; }

clean() { rm -rf "$SHM"; }

# Decoding after prompts of 8,000 tokens, our attention and Triton's: 8 layers of Qwen3-32B's shapes, or the prompts, whose tensor-core
# instruction is emulated, would take all the time. Both engines at once, on the first and the last GPU.
long_context() {
  local model=$SHM/qwen3-32b-8-layers way gpu last=$(($(nvidia-smi --list-gpus | wc -l) - 1))
  mkdir -p "$model" && step 60 long-context-model python3 scripts/gpu_e2e/synthetic.py qwen3-32b-8-layers "$model" --device cuda || return 1
  for way in custom triton_attn; do
    [[ $way == custom ]] && gpu=0 || gpu=$last
    CUDA_VISIBLE_DEVICES=$gpu step "${SPEED_LIMIT:-150}" "long-context-$way" python3 scripts/gpu_e2e/measure.py "$model" "$OUT/long-context-$way.json" \
      --only-graphs --ways kernels --attention "${way^^}" --streams 1 8 32 --prompt 8000 --tokens 64 --cache-bytes 10737418240 &
  done
  wait
  grep "'way'" "$OUT"/long-context-*.log
  rm -rf "$model"
}

for name in "$@"; do
  "$name"
  tar cJf "$ARCHIVE" -C "$OUT" .
done
