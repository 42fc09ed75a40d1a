# shellcheck shell=bash
# Sourced by gpu_e2e.sh and gpu_tp2.sh in the repository's root, with OUT (this run's files) and ARCHIVE (where they go) set.
# Unpacks what scripts/gpu_e2e/pack.py made to $WORK, has Python find it, and defines `step`.
mkdir -p "$OUT" "$WORK/site" "$(dirname "$ARCHIVE")"

if [[ ! -f $WORK/unpacked ]]; then
  tar xJf "$PACK/site.tar.xz" -C "$WORK/site" && tar xJf "$PACK/kernels.tar.xz" -C "$WORK/site" && touch "$WORK/unpacked"
fi
export PYTHONPATH=$WORK/site:$PWD LD_LIBRARY_PATH=$WORK/site:${LD_LIBRARY_PATH:-}
export VOLTSERVE_FORCE_VOLTA=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1 VLLM_CACHE_ROOT=$WORK/cache

# step SECONDS NAME COMMAND…
step() {
  local limit=$1 name=$2 began=$SECONDS; shift 2
  timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  echo "[$name] exit $code, $((SECONDS - began)) s"
  [[ $code == 0 ]] || tail -n "${TAIL:-25}" "$OUT/$name.log" | cut -c1-300
  return $code
}
