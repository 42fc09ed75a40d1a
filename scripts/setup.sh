#!/usr/bin/env bash
# Makes .venv from the lock files: uv, torch, the engine, voltserve itself. Idempotent and resumable: each step leaves a
# stamp with the checksum of its inputs. A step whose stamp is current is skipped. A step that was interrupted runs
# again. Reports each step and its duration. PYTHON picks the interpreter; WITH_RAY=1 adds the optional extra for
# several machines. ENGINE=gpu or ENGINE=cpu picks the engine and is remembered; without it, and with ENGINE=auto, the
# machine's cards do (scripts/find_engine.sh). Another engine than before makes .venv anew.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
STAMPS=$VENV/.setup
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_LINK_MODE=${UV_LINK_MODE:-hardlink} VIRTUAL_ENV=$PWD/$VENV
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
  fail "'$PYTHON' is $("$PYTHON" --version 2>&1 || true); Python 3.10 to 3.13 is needed. Name one: make setup PYTHON=python3.12"
command -v g++ >/dev/null || fail "g++ is needed (Debian and Ubuntu: apt install g++)"

# Which engine: asked for now, asked for earlier, or found.
asked=${ENGINE:-}
[[ -n $asked || ! -f $STAMPS/asked ]] || asked=$(<"$STAMPS/asked")
case $asked in
  gpu | cpu) engine=$asked reason="asked for with ENGINE; ENGINE=auto looks for cards" ;;
  auto | "") asked="" && read -r engine reason < <(scripts/find_engine.sh) ;;
  *) fail "ENGINE: expected gpu, cpu or auto, got '$asked'" ;;
esac
if [[ $engine == gpu && $(uname -m) != x86_64 ]]; then fail "the GPU engine's packages are for x86_64, and this is $(uname -m); ENGINE=cpu does without"; fi
before=$engine
[[ ! -d $STAMPS ]] || before=$(cat "$STAMPS/engine" 2>/dev/null || echo cpu)
if [[ $before != "$engine" ]]; then
  say "$VENV held the $before engine and is made anew"
  rm -f "$STAMPS/environment"
fi

# What the GPU engine takes: its packages once in .venv and once in uv's cache where that is on another disk.
room() {
  local free
  free=$(df --output=avail -B1G . | tail -n 1 | tr -d ' ')
  ((free >= 12)) || fail "the GPU engine needs 12 GB on this disk, and ${free} GB are free; free some, or ENGINE=cpu takes 2 GB where PyTorch's index answers"
}

# step NAME COMMAND... -- INPUT...: runs COMMAND unless NAME's stamp says it ran on these very inputs.
step() {
  local name=$1 command=() began sum; shift
  while [[ $1 != -- ]]; do command+=("$1"); shift; done; shift
  sum=$("$PYTHON" --version; sha256sum "$@"; declare -f "${command[0]}")
  [[ -f $STAMPS/$name && $(<"$STAMPS/$name") == "$sum" ]] && return 0
  say "$name …"
  began=$SECONDS
  "${command[@]}" || fail "$name failed; run 'make setup' again to resume here"
  mkdir -p "$STAMPS" && printf '%s' "$sum" >"$STAMPS/$name"
  say "$name took $((SECONDS - began)) s"
}

locked() { "$VENV/bin/uv" pip install --quiet --no-deps --require-hashes --compile-bytecode "$@"; }

environment() {
  "$PYTHON" -m venv --clear "$VENV"
  "$VENV/bin/python" -m pip install --quiet --require-hashes --no-deps -r requirements/uv.lock
}

torch() { scripts/install_torch_cpu.sh "$VENV/bin/uv"; }
gpu_torch() { room && locked -r requirements/torch.lock; }
several_machines() { locked -r requirements/ray.lock; }
packages() { scripts/install_engine.sh "$VENV/bin/uv" -r requirements/dev.lock; }

# Our kernels, compiled here against the torch just installed.
kernels() { "$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --reinstall ./kernels; }

# The same with the V100's machine code.
cuda_kernels() {
  local folder
  folder=$(mktemp -d)
  scripts/cuda_wheel.sh "$VENV/bin/python" "$folder" && "$VENV/bin/uv" pip install --quiet --no-deps --reinstall "$folder"/*.whl
  rm -rf "$folder"
}

ourselves() { "$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --editable .; }

began=$SECONDS
sources=(kernels/*.{toml,py} kernels/{bindings,contracts,cpu}/* kernels/cuda/linear/plan.* kernels/voltserve_kernels/*.py)
# Another vLLM would leave files of the one before beside its own.
step environment environment -- requirements/{uv,vllm}.lock
printf '%s' "$engine" >"$STAMPS/engine"
printf '%s' "$asked" >"$STAMPS/asked"
if [[ $engine == gpu ]]; then
  step torch gpu_torch -- requirements/torch.lock
else
  step torch torch -- requirements/torch.lock scripts/install_torch_cpu.sh
fi
step packages packages -- requirements/{engine,vllm,build,dev,torch}.lock scripts/install_engine.sh
[[ -z ${WITH_RAY:-} ]] || step ray several_machines -- requirements/{engine,ray}.lock
if [[ $engine == gpu ]]; then
  step kernels cuda_kernels -- requirements/torch.lock "${sources[@]}" kernels/cuda/*/* scripts/{cuda_wheel,build_cuda,fetch_nvcc}.sh
else
  step kernels kernels -- requirements/torch.lock "${sources[@]}"
fi
step voltserve ourselves -- pyproject.toml
say "ready in $((SECONDS - began)) s: $("$VENV/bin/python" --version), $VENV, the $engine engine ($reason)"
