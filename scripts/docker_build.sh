#!/usr/bin/env bash
# Builds voltserve's image for TARGET (gpu, cpu, gpu-ray, cpu-ray) with its tag and labels, and prints the tag:
# voltserve:VERSION-vllm0.28.0-cu128, …-cpu, …-cu128-ray or …-cpu-ray. Further arguments are docker build's:
# --build-arg BASE_IMAGE=… PYPI_INDEX=… DEBIAN_MIRROR=… Usage: docker_build.sh TARGET [ARGUMENT]...
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?usage: docker_build.sh gpu|cpu|gpu-ray|cpu-ray [ARGUMENT]...}
shift
declare -A suffixes=([gpu]=cu128 [cpu]=cpu [gpu-ray]=cu128-ray [cpu-ray]=cpu-ray)
[[ -n ${suffixes[$target]:-} ]] || { echo "docker_build: expected gpu, cpu, gpu-ray or cpu-ray, got $target" >&2; exit 2; }

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD)
[[ -z $(git status --porcelain --untracked-files=no) ]] || revision+=-dirty
tag=voltserve:$version-vllm0.28.0-${suffixes[$target]}
DOCKER_BUILDKIT=1 docker build --target "$target" --tag "$tag" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "$@" . >&2
echo "$tag"
