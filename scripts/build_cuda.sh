#!/usr/bin/env bash
# Builds build/cuda/libvoltserve_cuda.so, the CUDA kernels without torch. It holds sm_70 machine code, and PTX for Volta, for Ampere, and
# for Hopper and later. The nvcc is one that still knows Volta (scripts/fetch_nvcc.sh). Needs no GPU. Recompiles only what changed.
# Usage: build_cuda.sh [FROM TO]    e.g. 70 90: the PTX for Volta alone, compiled ahead for an H200 into build/cuda-70-90/, where it
# can be checked; 90 90: what an H200 makes of the library; 80 90: that without early launches (kernels/cuda/common/dependent.cuh), to validate
# perfmodel/sass_model.py.
set -euo pipefail
cd "$(dirname "$0")/.."
CUDA_HOME=$(scripts/fetch_nvcc.sh)
out=build/cuda code=(-gencode "arch=compute_70,code=[sm_70,compute_70]")
for newer in 80 90; do code+=(-gencode "arch=compute_$newer,code=compute_$newer"); done
if (($# == 2)); then out=build/cuda-$1-$2 code=(-gencode "arch=compute_$1,code=sm_$2"); fi
sources=()
for source in kernels/cuda/*/*.cu kernels/cuda/*/*.cpp kernels/tools/*.cu; do
  [[ $source == */ops.cpp ]] || sources+=("$source")  # those include torch; kernels/setup.py compiles them
done

# What an object was compiled from: for which GPU, and the files of ours that nvcc read the last time.
sum_of() {
  local files
  mapfile -t files < <(grep -o 'kernels/[^ ]*' "$1.d")
  { echo "${code[*]}"; cat "${files[@]}"; } | sha256sum
}

compile() {
  local source=$1 object=$2
  [[ -f $object.d && -f $object.sum && $(<"$object.sum") == "$(sum_of "$object")" ]] && return 0
  "$CUDA_HOME/bin/nvcc" "${code[@]}" -O3 -std=c++17 -Werror all-warnings -Xcompiler -fPIC,-Wall,-Wextra -Xptxas -v -Ikernels -MMD -MF "$object.d" \
    -c "$source" -o "$object" 2>"$object.ptxas" || { cat "$object.ptxas" >&2; return 1; }
  sum_of "$object" >"$object.sum"
}

objects=() jobs=()
for source in "${sources[@]}"; do
  object=${source#kernels/} object=$out/${object#cuda/} object=${object%.*}.o  # out/ROOM/NAME.o; out/tools is not part of the product
  mkdir -p "${object%/*}"
  objects+=("$object")
  compile "$source" "$object" &
  jobs+=($!)
  while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n || true; done
done
for job in "${jobs[@]}"; do wait "$job"; done
for object in "$out"/*/*.o "$out"/*.o; do  # of sources that are no more
  [[ " ${objects[*]} " == *" $object "* ]] || rm -f "$object" "$object".*
done
# Which structs the library's functions take (kernels/tools/c_structs.py).
headers=$(printf '%s\n' kernels/cuda/*/args.h kernels/cuda/*/plan.h | LC_ALL=C sort | xargs cat | sha256sum | cut -d ' ' -f 1)
# shellcheck disable=SC2016  # the loader expands $ORIGIN
g++ -shared "${objects[@]}" -x c++ <(echo "extern \"C\" const char *voltserve_headers() { return \"$headers\"; }") -x none \
  -o "$out/libvoltserve_cuda.so" "-L$CUDA_HOME/lib64" -lcudart '-Wl,-rpath,$ORIGIN'
cp -u "$CUDA_HOME/lib64/libcudart.so.12" "$out/"
echo "$out/libvoltserve_cuda.so"
