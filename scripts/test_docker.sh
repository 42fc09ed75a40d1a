#!/usr/bin/env bash
# `make test-docker`: builds the cpu image, and tests it and docker-compose.yml with the real engine (tests/docker).
# Where no Docker engine answers, Debian's is installed (needs root), started with a data folder of its own, and stopped at the
# end. The folder is kept between runs for its layers. Where the base image cannot be pulled, scripts/docker_base.sh makes a
# stand-in. Needs about 25 GB in DOCKER_DATA where the PyTorch index does not answer (scripts/install_torch_cpu.sh), else 5 GB.
# COMPOSE names the compose command to test; by default `docker compose`, or else docker-compose.
set -euo pipefail
cd "$(dirname "$0")/.."
DOCKER_DATA=${DOCKER_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/voltserve/docker}
BASE_IMAGE=${BASE_IMAGE:-python:3.12-slim-bookworm}
STAND_IN=voltserve-base:bookworm-slim
MODEL=models/smollm2-nvfp4

say() { printf '[test-docker] %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
need() {  # PROGRAM PACKAGE: installs what is absent
  PATH=$PATH:/usr/sbin command -v "$1" >/dev/null && return 0
  [[ $EUID == 0 ]] || fail "$1 is absent; install it (Debian: $2), or run this as root"
  say "installing $2"
  apt-get update -qq && apt-get install -qq --no-install-recommends "$2" >/dev/null
}

[[ -f $MODEL/config.json ]] || fail "$MODEL is missing: make $MODEL"

stop_dockerd() {
  kill "$(<"$run/pid")" 2>/dev/null || true
  for _ in {1..60}; do [[ -e $run/pid ]] || break; sleep 0.5; done
  rm -rf "$run"
}
if ! timeout 20 docker info >/dev/null 2>&1; then
  need dockerd docker.io
  need docker-compose docker-compose
  [[ $EUID == 0 ]] || fail "no Docker engine answers and only root can start one"
  run=$(mktemp -d /tmp/voltserve-dockerd.XXXXXX)
  say "starting dockerd with its data in $DOCKER_DATA"
  /usr/sbin/dockerd --data-root "$DOCKER_DATA" --exec-root "$run/exec" --pidfile "$run/pid" --host "unix://$run/sock" >"$run/log" 2>&1 &
  trap stop_dockerd EXIT
  # Debian's own client: a newer one elsewhere on PATH cannot use BuildKit without its buildx plugin.
  export DOCKER_HOST=unix://$run/sock PATH=/usr/bin:$PATH
  for _ in {1..60}; do docker info >/dev/null 2>&1 && break; sleep 0.5; done
  docker info >/dev/null 2>&1 || { tail -n 5 "$run/log" >&2; fail "dockerd did not start; is this a container without privileges?"; }
fi
need promtool prometheus
if [[ -z ${COMPOSE:-} ]]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
say "$(docker version --format 'engine {{.Server.Version}}'), $($COMPOSE version --short) as $COMPOSE"

if ! docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && ! timeout 300 docker pull --quiet "$BASE_IMAGE" >/dev/null 2>&1; then
  say "$BASE_IMAGE cannot be pulled; a stand-in is made"
  scripts/docker_base.sh "$STAND_IN" >/dev/null
  BASE_IMAGE=$STAND_IN
fi
image=$(scripts/docker_build.sh cpu --build-arg "BASE_IMAGE=$BASE_IMAGE")
say "built $image"
export COMPOSE VOLTSERVE_TEST_IMAGE=$image VOLTSERVE_TEST_BASE=$BASE_IMAGE
.venv/bin/pytest tests/docker "$@"
