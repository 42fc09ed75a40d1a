"""Builds voltserve_kernels/ops.so with g++: each source has flags of its own.

The object uses torch's stable ABI and no Python. One wheel therefore serves torch 2.10, Python 3.10 and all later ones.
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
# The oldest torch whose stable ABI is used: 2.10.
FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]

SOURCES: dict[str, list[str]] = {
    "bindings/linear.cpp": [],
    "bindings/fp8.cpp": [],
    "bindings/all_reduce.cpp": [],
    "bindings/attention.cpp": [],
    "bindings/gdn.cpp": [],
    "bindings/decoder.cpp": [],
    "cpu/attention.cpp": [],
    "cpu/decoder.cpp": [],
    "cpu/nvfp4_pack.cpp": [],
    "cpu/pool.cpp": [],
    "cpu/portable.cpp": ["-O2"],
}
if platform.machine() == "x86_64":
    SOURCES["cpu/avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    # g++ 12 warns of registers that its own headers leave undefined on purpose (GCC bug 105593).
    SOURCES["cpu/avx512.cpp"] = ["-mavx512f", "-mavx512bw", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]

# `make kernels-cuda` sets these: the CUDA kernels' objects as scripts/build_cuda.sh leaves them, and their toolkit.
CUDA_OBJECTS = [
    str(path)
    for path in sorted(Path(os.environ.get("VOLTSERVE_CUDA_OBJECTS", "/nonexistent")).glob("*/*.o"))
    if path.parent.name != "tools"
]
CUDA_HOME = Path(os.environ.get("CUDA_HOME", ""))
CUDA_LIBRARIES: list[str] = []
if not CUDA_OBJECTS:  # they include it otherwise
    SOURCES["cuda/linear/plan.cpp"] = []
if CUDA_OBJECTS:
    for ops in sorted(Path("cuda").glob("*/ops.cpp")):
        SOURCES[str(ops)] = ["-DUSE_CUDA", "-isystem", str(CUDA_HOME / "include")]
    CUDA_LIBRARIES = ["-ltorch_cuda", f"-L{CUDA_HOME / 'lib64'}", "-lcudart"]


class BuildOps(build_ext):
    """Compiles SOURCES in parallel and links them."""

    def build_extension(self, ext: Extension) -> None:
        """Raises CalledProcessError after the compiler's own message."""
        torch = Path(find_spec("torch").submodule_search_locations[0])
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = str(objects / (source.replace("/", "-") + ".o"))
            run([CXX, *FLAGS, *SOURCES[source], "-I.", "-isystem", str(torch / "include"), "-c", source, "-o", target])
            return target

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = list(pool.map(compile_one, SOURCES))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", *CUDA_LIBRARIES, "-pthread"]
        run([CXX, "-shared", *compiled, *CUDA_OBJECTS, "-o", str(output), *libraries])

    def get_ext_filename(self, fullname: str) -> str:
        """Without Python's version in it."""
        return fullname.replace(".", "/") + ".so"


class AnyPython3Wheel(bdist_wheel):
    """Tagged for this platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """(python, abi, platform)."""
        return "py3", "none", super().get_tag()[2]


def run(command: list[str]) -> None:
    """Shows and runs a compiler."""
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


# The local part tells the engine and the gateway what they can run on (engine/gpus.py, server/config/settings.py).
VERSION = "0.1.0+cuda" if CUDA_OBJECTS else "0.1.0"

setup(
    version=VERSION,
    ext_modules=[Extension("voltserve_kernels.ops", sources=list(SOURCES))],
    cmdclass={"build_ext": BuildOps, "bdist_wheel": AnyPython3Wheel},
)
