#!/usr/bin/env bash
# Installs the engine's packages into VIRTUAL_ENV, beside the torch there, with the uv given. For scripts/setup.sh and
# the Dockerfile. vLLM is built from its source as Python alone (`empty`): its operators are ours (engine/operators).
# Without CARGO=false its build would compile an optional part in Rust wherever there is a cargo.
# Usage: VIRTUAL_ENV=DIR install_engine.sh UV [-r MORE.lock]...
set -euo pipefail
uv=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
locked=("$uv" pip install --quiet --no-deps --require-hashes --compile-bytecode)
"${locked[@]}" -r requirements/engine.lock -r requirements/build.lock "$@"
VLLM_TARGET_DEVICE=empty CARGO=false "${locked[@]}" --no-build-isolation --no-binary vllm -r requirements/vllm.lock
