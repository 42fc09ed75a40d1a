#!/usr/bin/env bash
# Builds voltserve's image for KIND (gpu, cpu, gpu-ray, cpu-ray) with its tag and labels, and prints the tag:
# voltserve:VERSION-vllm0.28.0-cu128, …-cpu, …-cu128-ray or …-cpu-ray. Further arguments are docker build's:
# --build-arg BASE_IMAGE=… PYPI_INDEX=… DEBIAN_MIRROR=… Usage: docker_build.sh KIND [ARGUMENT]...
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?usage: docker_build.sh gpu|cpu|gpu-ray|cpu-ray [ARGUMENT]...}
shift
declare -A suffixes=([gpu]=cu128 [cpu]=cpu [gpu-ray]=cu128-ray [cpu-ray]=cpu-ray)
[[ -n ${suffixes[$kind]:-} ]] || { echo "docker_build: expected gpu, cpu, gpu-ray or cpu-ray, got $kind" >&2; exit 2; }
target=(--target "$kind")
[[ $kind != *-ray ]] || target=(--target ray --build-arg "RAY_ON=${kind%-ray}")

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD)
[[ -z $(git status --porcelain --untracked-files=no) ]] || revision+=-dirty
tag=voltserve:$version-vllm0.28.0-${suffixes[$kind]}
DOCKER_BUILDKIT=1 docker build "${target[@]}" --tag "$tag" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "$@" . >&2
echo "$tag"
