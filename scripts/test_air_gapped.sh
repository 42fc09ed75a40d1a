#!/usr/bin/env bash
# Whether an image serves where there is no network. Saves IMAGE, and loads it into an empty Docker engine in a network namespace
# that has loopback only. Starts it there with docker-compose.yml (profile cpu), and asks it. Needs root, dockerd, docker-compose,
# and room for the image in TMPDIR. Usage: test_air_gapped.sh [IMAGE]
set -euo pipefail
cd "$(dirname "$0")/.."
IMAGE=${1:-voltserve:0.1.0-vllm0.28.0-cpu}
MODEL=$PWD/models/smollm2-nvfp4
run=$(mktemp -d "${TMPDIR:-/tmp}/voltserve-air-gapped.XXXXXX")

say() { printf '[air-gapped] %s\n' "$*" >&2; }
there() { DOCKER_HOST=unix://$run/sock PATH=/usr/bin:$PATH "$@"; }
inside() { nsenter --net="/proc/$(<"$run/pid")/ns/net" "$@"; }
stop() {
  (cd "$run/project" 2>/dev/null && there docker-compose down --volumes --timeout 10 >/dev/null 2>&1) || true
  kill "$(<"$run/pid")" 2>/dev/null || true
  for _ in {1..60}; do [[ -e $run/pid ]] || break; sleep 0.5; done
  rm -rf "$run"
}

[[ -f $MODEL/config.json ]] || { say "error: $MODEL is missing: make models/smollm2-nvfp4"; exit 1; }
unshare --net bash -c "ip link set lo up; exec dockerd --data-root '$run/data' --exec-root '$run/exec' --pidfile '$run/pid' \
  --host 'unix://$run/sock'" >"$run/log" 2>&1 &
trap stop EXIT
for _ in {1..60}; do there docker info >/dev/null 2>&1 && break; sleep 0.5; done
there docker info >/dev/null 2>&1 || { tail -n 5 "$run/log" >&2; exit 1; }
say "an engine with $(there docker images --quiet | wc -l) images; routes beyond its own bridges: $(inside ip route | grep -vc ' dev docker0 \| dev br-' || true)"

began=$SECONDS
docker save "$IMAGE" | there docker load >&2
say "saved and loaded in $((SECONDS - began)) s"
mkdir "$run/project"
cp -r docker-compose.yml configs "$run/project/"
sed "s#^MODEL_DIR=.*#MODEL_DIR=$MODEL#; s#^COMPOSE_PROFILES=.*#COMPOSE_PROFILES=cpu#" .env.example >"$run/project/.env"
printf 'CPU_IMAGE=%s\n' "$IMAGE" >>"$run/project/.env"
cd "$run/project"
began=$SECONDS
there docker-compose up -d >&2
container=$(there docker-compose ps -q cpu)
for _ in {1..300}; do
  health=$(there docker inspect --format '{{.State.Health.Status}}' "$container")
  [[ $health == healthy ]] && break
  sleep 1
done
say "$health after $((SECONDS - began)) s"
answer=$(inside curl -s --max-time 120 http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
  -d '{"model": "/models/quasar-nvfp4", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}')
say "$answer"
[[ $health == healthy && $answer == *Paris* ]]
