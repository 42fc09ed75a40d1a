#!/usr/bin/env bash
# Prints the folder of a CUDA 12.x toolkit that compiles for sm_70 (CUDA 13 dropped Volta), for use as CUDA_HOME.
# CUDA_HOME is taken if its nvcc does, then one in /usr/local. Otherwise 12.4.131 is put together once, in the cache
# folder. Its parts are Debian trixie's nvidia-cuda-toolkit (compiler, cuobjdump, nvdisasm) and three PyPI packages
# (headers, nvvm, libcudart): 115 MB of checksummed downloads, under 15 s. Needs no GPU, no root and no change to the
# machine. Needs apt-get, dpkg, pip. DEBIAN_MIRROR (scheme and host) is where to fetch from on a machine that is no
# Debian, an Ubuntu say.
set -euo pipefail

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/voltserve
TREE=$CACHE/cuda-12.4.131
DEB="nvidia-cuda-toolkit"
DEB_VERSION=12.4.131~12.4.1-2
DEB_SHA256=cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf '[nvcc] %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
knows_volta() { [[ -x $1/bin/nvcc ]] && "$1/bin/nvcc" --list-gpu-arch 2>/dev/null | grep -qx compute_70; }

if [[ -n ${CUDA_HOME:-} ]]; then
  knows_volta "$CUDA_HOME" && { echo "$CUDA_HOME"; exit 0; }
  say "CUDA_HOME=$CUDA_HOME has no nvcc that compiles for sm_70 (CUDA 13 dropped Volta); using $TREE"
fi
knows_volta "$TREE" && { echo "$TREE"; exit 0; }
for installed in "${LOCAL:-/usr/local}"/cuda "${LOCAL:-/usr/local}"/cuda-12*; do
  knows_volta "$installed" && { say "using $installed"; echo "$installed"; exit 0; }
done

for tool in apt-get dpkg sha256sum python3; do
  command -v "$tool" >/dev/null || fail "$tool is needed to fetch the compiler; or set CUDA_HOME to a CUDA 12.x toolkit"
done
[[ $(uname -m) == x86_64 ]] || fail "the fetched compiler is for x86_64; set CUDA_HOME to a CUDA 12.x toolkit"

mkdir -p "$CACHE"
work=$(mktemp -d "$CACHE/.nvcc.XXXXXX")
trap 'rm -rf "$work"' EXIT
began=$SECONDS

# A private apt configuration: own sources, lists and cache, the machine's own mirror, only another suite.
mirror=${DEBIAN_MIRROR:+$DEBIAN_MIRROR/debian}
# shellcheck disable=SC2016  # apt-get expands $(REPO_URI)
[[ -n $mirror ]] || mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Component: main' | grep -v security | head -n 1) || true  # none
[[ -n $mirror ]] || fail "apt names no Debian mirror. On Debian run apt-get update once; elsewhere set DEBIAN_MIRROR=https://HOST to one, or CUDA_HOME to a CUDA 12.x toolkit"
mkdir -p "$work"/apt/{lists,cache/archives}/partial
# Only Debian has its keyring installed. The one file fetched is held to its checksum either way.
trust=signed-by=$KEYRING
[[ -f $KEYRING ]] || trust=trusted=yes
echo "deb [$trust arch=amd64] $mirror trixie main contrib non-free" >"$work/apt/sources.list"
apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/apt/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/apt/lists"
     -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3)
say "fetching $DEB $DEB_VERSION"
"${apt[@]}" update >&2
(cd "$work" && "${apt[@]}" download "$DEB=$DEB_VERSION" >&2)
echo "$DEB_SHA256  $(echo "$work/$DEB"_*.deb)" | sha256sum --check --quiet >&2 || fail "$DEB: wrong checksum"
dpkg -x "$work/$DEB"_*.deb "$work/deb"

say "fetching headers, nvvm and libcudart"
cat >"$work/wheels.txt" <<'WHEELS'
nvidia-cuda-nvcc-cu12==12.4.131 --hash=sha256:e4c9a35435c3b0e36c6397c5696334c9ea6650e524736cbd1c5d345ea099bb04
nvidia-cuda-runtime-cu12==12.4.127 --hash=sha256:64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5
nvidia-cuda-cccl-cu12==12.8.90 --hash=sha256:575bc5cfb0fe4a1956c539215c0f1e6718821b95a68ef6b7abf226aa87e3a5ad
WHEELS
# The wheels hold no Python code; the platform is named so that any pip takes them.
python3 -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --platform manylinux2014_x86_64 \
  --dest "$work/wheels" --requirement "$work/wheels.txt" >&2
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/wheels"; done

# One tree in the toolkit's own layout.
tree=$work/tree nvidia=$work/wheels/nvidia
mkdir -p "$tree"/{bin,include,lib64} "$tree/nvvm/bin"
cp -a "$work"/deb/usr/bin/{cudafe++,ptxas,fatbinary,nvlink,bin2c,cuobjdump,nvdisasm,cu++filt} "$tree/bin/"
cp -a "$work"/deb/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} "$tree/bin/"
cp -a "$work/deb/usr/lib/nvidia-cuda-toolkit/bin/cicc" "$tree/nvvm/bin/"
for package in cuda_nvcc cuda_runtime cuda_cccl; do cp -a "$nvidia/$package/include/." "$tree/include/"; done
cp -a "$nvidia/cuda_nvcc/nvvm/." "$tree/nvvm/"
cp -a "$nvidia/cuda_runtime/lib/libcudart.so.12" "$tree/lib64/"
ln -s libcudart.so.12 "$tree/lib64/libcudart.so"
cat >"$tree/bin/nvcc.profile" <<'PROFILE'
TOP              = $(_HERE_)/..
CICC_PATH        = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib64:
PATH            += $(CICC_PATH):$(_HERE_):
INCLUDES        += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES       =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
chmod -R u+w,a+rX "$tree"
chmod a+x "$tree"/bin/* "$tree/nvvm/bin/cicc"

printf '__global__ void probe(float *x) { x[threadIdx.x] *= 2; }\n' >"$work/probe.cu"
"$tree/bin/nvcc" -arch=sm_70 -cubin -o "$work/probe.cubin" "$work/probe.cu" >&2 || fail "the fetched nvcc does not compile for sm_70"
rm -rf "$TREE"
mv "$tree" "$TREE"
say "ready in $((SECONDS - began)) s: $TREE ($(du -sm "$TREE" | cut -f1) MB)"
echo "$TREE"
