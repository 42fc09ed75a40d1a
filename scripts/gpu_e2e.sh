#!/usr/bin/env bash
# Runs the overlay end to end on a GPU machine: the launcher, HTTP, vLLM, our kernels. The machine has Python 3.12 and a torch of
# its own. scripts/gpu_e2e/pack.py made the rest here (build/gpu_e2e/). A GPU that is no V100 is treated as one
# (VOLTSERVE_FORCE_VOLTA). Its speed is its own: after Volta mma.m8n8k4 is emulated, with which a V100 multiplies 2 to 1024
# tokens. Results go to $OUT/results.tar.xz (default: build/gpu_e2e/out/), renewed after each step; each step has a time limit.
# Usage: gpu_e2e.sh STEP…     small | moe | moe_sure | answers | speed | eager_speed | hybrid | hybrid_eager |
#   fused_speed | small_answers | long_context | clean
# Large models stay in the machine's memory, where another step may want them; `clean` removes them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
ARCHIVE=${OUT:-$PWD/build/gpu_e2e/out}/results.tar.xz
WORK=${WORK:-/tmp/gpu_e2e}
OUT=$WORK/out
PACK=build/gpu_e2e
# shellcheck source=scripts/gpu_e2e/environment.sh
source scripts/gpu_e2e/environment.sh
# Parts of the model may come with different calls.
cp -u $PACK/model.0? "$WORK/" 2>/dev/null
SHM=/dev/shm/gpu_e2e
TORCH=$(python3 -c 'from importlib.metadata import version; print(version("torch"))')
DEVICE="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), torch $TORCH; our kernels as built for GPUs after Volta"

# eager NAME MODEL FLAG…: the default preset's steps, recorded and not.
eager() {
  local name=$1 model=$2; shift 2
  step "${SPEED_LIMIT:-150}" "$name" python3 -m scripts.gpu_e2e.measure "$model" "$OUT/$name.json" --eager --ways kernels "$@"
  grep "'way'" "$OUT/$name.log"
}

# What an eager step of a small model is made of.
small_model() { [[ -d $WORK/small ]] || step 30 small-model python3 -m scripts.gpu_e2e.synthetic smollm2 "$WORK/small"; }
small() { small_model && eager small "$WORK/small" --memory 0.1 --cache-bytes 2147483648 --streams 1 8; }

model() {
  [[ -f $WORK/model/model.safetensors ]] && return 0
  mkdir -p "$WORK/model" && step 60 unpack python3 -m scripts.gpu_e2e.unpack "$WORK" "$WORK/model"
}

# ask NAME MODEL FLAG…: an engine answers the fixed questions, through HTTP. The cache's size is given: engines that start side by side
# would otherwise count each other's memory as their own.
BESIDE_OTHERS=(--dtype float16 --max-model-len 2048 --max-num-seqs 32 --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 2147483648)
ask() {
  local name=$1 model=$2; shift 2
  step 150 "$name" python3 -m scripts.gpu_e2e.answers --questions $PACK/questions.json "$model" "$OUT/$name.json" "${BESIDE_OTHERS[@]}" "$@"
}

# agree REFERENCE OTHER WHAT FLAG…: compares two engines' answers.
agree() {
  local reference=$1 other=$2 what=$3; shift 3
  python3 -m scripts.gpu_e2e.compare "$reference" "$OUT/$other.json" "$OUT/$other-compared.json" --what "$what" --device "$DEVICE" \
    --command "scripts/gpu_e2e.sh $STEP" "$@" && echo "[$other] agrees" || echo "[$other] DIFFERS"
}

# The real model eagerly, recorded and not, and in graphs. One engine's graphs compute something else, which the start-up check must notice.
# The reference is what answers.py got from the CPU engine ($PACK/cpu.json).
answers() {
  model || return 1
  ask eager "$WORK/model" --enforce-eager &
  TORCH_COMPILE_DISABLE=1 ask not-recorded "$WORK/model" --enforce-eager &
  ask graphs "$WORK/model" &
  ask triton "$WORK/model" --enforce-eager --attention-backend TRITON_ATTN &
  ask faulty "$WORK/model" --worker-extension-cls trials.faulty.FaultyGraphs &
  wait
  for way in eager not-recorded graphs; do
    agree $PACK/cpu.json $way "SmolLM2-135M in NVFP4: the CPU engine's answers in float32 and the GPU engine's, $way"
  done
  agree "$OUT/eager.json" triton "SmolLM2-135M in NVFP4: answers with our attention and with Triton's"
}

# experts MODEL: a random mixture of experts, eagerly and in graphs, beside its dequantized twin on vLLM's own kernels. Eager steps that are
# not recorded show what the routers of both chose.
experts() {
  local model=$1 twin=$1-twin way
  for way in "$model" "$twin"; do
    local twin_flag=(); [[ $way == "$twin" ]] && twin_flag=(--twin)
    step 60 "$way-model" python3 -m scripts.gpu_e2e.synthetic "$model" "$WORK/$way" "${twin_flag[@]}" &&
      cp $PACK/tokenizer/* "$WORK/$way/" || return 1
  done
  rm -f "$WORK/$model".{first,pt} "$WORK/$twin".{first,pt}
  ask "$twin" "$WORK/$twin" --enforce-eager &
  ask "$model-eager" "$WORK/$model" --enforce-eager &
  ask "$model-graphs" "$WORK/$model" &
  watch "$model" "$twin" &
  watch "$twin" "$model" &
  wait
  python3 -m scripts.gpu_e2e.routing judge "$WORK/$twin.pt" "$WORK/$model.pt" "$OUT/$model-routing.json" --device "$DEVICE" \
    --command "scripts/gpu_e2e.sh $STEP" && echo "[$model-routing] agrees" || echo "[$model-routing] DIFFERS"
  for way in eager graphs; do
    agree "$OUT/$twin.json" "$model-$way" "a random mixture of 16 experts ($model): its dequantized twin on vLLM's kernels, and NVFP4 on ours, $way" \
      --routing "$OUT/$model-routing.json"
  done
}
# watch MODEL OTHER
watch() {
  TORCH_COMPILE_DISABLE=1 step 150 "$1-watched" python3 -m scripts.gpu_e2e.routing ask $PACK/questions.json "$WORK/$1" "$WORK/$1.pt" \
    --other "$WORK/$2.pt" "${BESIDE_OTHERS[@]}"
}
# Routers that hardly tell experts apart, and routers to which the last that they choose means little.
moe() { experts moe; }
moe_sure() { experts moe-sure; }

# Qwen3-32B's shapes: tokens per second, against dequantizing on every call and against reading the weights.
BIG=$SHM/qwen3-32b
big_model() { [[ -f $BIG/config.json ]] || step 120 big-model python3 -m scripts.gpu_e2e.synthetic qwen3-32b "$BIG" --device cuda; }
speed() {
  big_model && step "${SPEED_LIMIT:-280}" big-speed python3 -m scripts.gpu_e2e.measure "$BIG" "$OUT/big.json" \
    --tokens 32 --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'" "$OUT/big-speed.log"
}

# The same in graphs of fused steps, and in graphs of the model's modules.
fused_speed() {
  big_model && step "${SPEED_LIMIT:-170}" fused-speed python3 -m scripts.gpu_e2e.measure "$BIG" "$OUT/fused.json" \
    --only-graphs --ways kernels unfused --library "$WORK/site/libvoltserve_cuda.so"
  grep "'way'\|agreement" "$OUT/fused-speed.log"
}

# A small random model's answers: in graphs, in eager steps, fused, and in those of its modules, with which both are compared.
small_answers() {
  small_model && cp $PACK/tokenizer/* "$WORK/small/" || return 1
  TORCH_COMPILE_DISABLE=1 ask small-modules "$WORK/small" --enforce-eager &
  ask small-eager "$WORK/small" --enforce-eager &
  ask small-graphs "$WORK/small" &
  ask small-faulty "$WORK/small" --enforce-eager --worker-extension-cls trials.faulty.FaultyGraphs &
  wait
  for way in eager graphs; do
    agree "$OUT/small-modules.json" small-$way "a random model of SmolLM2's shapes: answers of its modules, and of fused steps, $way"
  done
}

# Its eager steps.
eager_speed() { big_model && eager big-eager "$BIG" --tokens 32; }

# The 27B with Gated DeltaNet layers, text only: as `speed`. LAYERS=8 for a short trial.
HYBRID=$SHM/qwen3.8-27b
hybrid_model() {
  [[ -f $HYBRID/config.json ]] ||
    step 120 hybrid-model python3 -m scripts.gpu_e2e.synthetic_hybrid "$HYBRID" --layers "${LAYERS:-64}" --device cuda
}
hybrid() {
  hybrid_model && step "${SPEED_LIMIT:-280}" hybrid-speed python3 -m scripts.gpu_e2e.measure "$HYBRID" "$OUT/hybrid.json" \
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
  mkdir -p "$model" && step 60 long-context-model python3 -m scripts.gpu_e2e.synthetic qwen3-32b-8-layers "$model" --device cuda || return 1
  for way in custom triton_attn; do
    [[ $way == custom ]] && gpu=0 || gpu=$last
    CUDA_VISIBLE_DEVICES=$gpu step "${SPEED_LIMIT:-150}" "long-context-$way" python3 -m scripts.gpu_e2e.measure "$model" "$OUT/long-context-$way.json" \
      --only-graphs --ways kernels --attention "${way^^}" --streams 1 8 32 --prompt 8000 --tokens 64 --cache-bytes 10737418240 &
  done
  wait
  grep "'way'" "$OUT"/long-context-*.log
  rm -rf "$model"
}

for STEP in "$@"; do
  "$STEP"
  tar cJf "$ARCHIVE" -C "$OUT" .
done
