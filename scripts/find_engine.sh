#!/usr/bin/env bash
# Prints which engine this machine is for, and why: "gpu REASON" where it has a Tesla V100, "cpu REASON" where not. The
# kernels and presets of the GPU engine are for compute capability 7.0, so other cards are left to the CPU engine.
# DEV stands for /dev. Usage: find_engine.sh
set -euo pipefail
DEV=${DEV:-/dev}

if cards=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null) && [[ -n $cards ]]; then
  # shellcheck disable=SC2001  # a pipe of sed commands
  names=$(sed 's/, /: compute capability /' <<<"$cards" | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 × /' | paste -sd';' | sed 's/;/, /g')
  if grep -q ', 7\.0$' <<<"$cards"; then echo "gpu nvidia-smi lists $names"; else echo "cpu no Tesla V100: nvidia-smi lists $names"; fi
elif [[ -e $DEV/nvidia0 ]]; then
  echo "gpu $DEV/nvidia0 is there, and nvidia-smi does not say which card it is"
else
  echo "cpu no NVIDIA card: neither nvidia-smi nor $DEV/nvidia0 answers"
fi
