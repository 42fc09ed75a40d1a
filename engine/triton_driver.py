"""Loads and launches Triton's kernels where there is no C compiler.

Triton 3.6 generates C at run time and compiles it: a module that loads kernels, and a launcher per signature. Both only
call a few functions of libcuda, which ctypes can call as well. Such a launch takes longer. But on V100s the engine
launches few of Triton's kernels, and replayed CUDA graphs launch none.
"""

import ctypes
import shutil
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# From cuda.h. A kernel's parameters are passed as one block: CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
PARAMETERS, PARAMETERS_SIZE = 1, 2
INVALID_VALUE, DEVICE_POINTER, PREFER_SHARED = 1, 3, 1
FUNCTION = {"max_threads": 0, "static_shared": 1, "local_bytes": 3, "registers": 4, "dynamic_shared": 8}
DEVICE = {
    "warpSize": 10,
    "max_num_regs": 12,
    "sm_clock_rate": 13,
    "multiprocessor_count": 16,
    "mem_clock_rate": 36,
    "mem_bus_width": 37,
    "max_shared_mem": 97,
}
ALWAYS_SHARED = 48 * 1024  # bytes of shared memory that a kernel gets without asking

# Triton's scalar types in struct's notation. Parameters are laid out as in a C struct: each aligned to its size.
FORMATS = {
    **{"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"},
    **{"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"fp16": "e", "bf16": "H", "fp32": "f", "f32": "f", "fp64": "d"},
}


def compiler(environ: Mapping[str, str]) -> str:
    """The C compiler that Triton would use, or "" without a compiler or Python's headers."""
    found = environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return found if header.is_file() else ""


def activate() -> None:
    """Makes Triton use this driver in this process. Touches no GPU."""
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class Driver(CudaDriver):  # type: ignore[misc]  # Triton is untyped
        def __init__(self) -> None:
            cuda = Cuda(ctypes.CDLL("libcuda.so.1"))
            self.utils = Loader(cuda)
            self.launcher_cls = partial(Launcher, cuda)
            GPUDriver.__init__(self)  # CudaDriver's own compiles

    driver.set_active(Driver())


class Cuda:
    """libcuda's functions. An error code is raised as a RuntimeError."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __call__(self, function: str, *arguments: Any) -> None:
        """Calls a function that returns a CUresult."""
        if code := getattr(self.library, function)(*arguments):
            name = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(name))
            raise RuntimeError(f"Triton, {function}: {(name.value or b'unknown error').decode()} ({code})")

    def number(self, function: str, *arguments: Any) -> int:
        """Calls a function that writes an int to its first argument, and returns that int."""
        value = ctypes.c_int()
        self(function, ctypes.byref(value), *arguments)
        return value.value

    def device_address(self, argument: Any, index: int) -> int:
        """The device address of `argument`: a tensor, an address, or None for a null pointer.

        Raises:
            ValueError: it is neither GPU memory nor host memory mapped for a GPU.
        """
        if argument is None or isinstance(argument, int):
            return argument or 0
        address = ctypes.c_uint64(argument.data_ptr())
        if not address.value:
            return 0
        found = ctypes.c_uint64()
        code = self.library.cuPointerGetAttribute(ctypes.byref(found), DEVICE_POINTER, address)
        if code == INVALID_VALUE:
            raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?)")
        return found.value

    def ensure_context(self, device: Callable[[], int]) -> None:
        """Gives a thread without a context the one of `device`, which PyTorch uses, too."""
        context = ctypes.c_void_p()
        self("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device())
            self("cuCtxSetCurrent", context)


class Loader:
    """Triton's `utils` of a driver: a device's properties, and loading a kernel."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The properties that Triton reads, in bytes, counts and kHz."""
        return {name: self.cuda.number("cuDeviceGetAttribute", of, device) for name, of in DEVICE.items()}

    def load_binary(self, name: str, image: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Loads machine code. `shared`: bytes of shared memory that a block will use.

        Returns module, function, registers per thread, spilled words per thread, and the most threads per block.
        """
        cuda, module, function = self.cuda, ctypes.c_void_p(), ctypes.c_void_p()
        cuda.ensure_context(lambda: device)
        cuda("cuModuleLoadData", ctypes.byref(module), image)
        cuda("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        most = self.get_device_properties(device)["max_shared_mem"]
        if shared > ALWAYS_SHARED and most > ALWAYS_SHARED:
            static = cuda.number("cuFuncGetAttribute", FUNCTION["static_shared"], function)
            cuda("cuFuncSetCacheConfig", function, PREFER_SHARED)
            cuda("cuFuncSetAttribute", function, FUNCTION["dynamic_shared"], most - static)
        registers, local, threads = (
            cuda.number("cuFuncGetAttribute", FUNCTION[what], function)
            for what in ("registers", "local_bytes", "max_threads")
        )
        return module.value or 0, function.value or 0, registers, local // 4, threads


class Launcher:
    """Launches one compiled kernel. Triton constructs it from `source`, which has the signature, and `metadata`.

    Raises:
        RuntimeError: the kernel needs a feature that only GPUs after Volta have.
    """

    def __init__(self, cuda: Cuda, source: Any, metadata: Any) -> None:
        self.cuda = cuda
        self.signature = tuple(source.signature.values())
        types = [kind for kind, _ in leaves(self.signature, self.signature)]
        refuse_what_is_missing(types, metadata)
        # After a kernel's own parameters Triton passes two pointers to scratch memory. Here they are always null.
        formats = ["Q" if kind[0] == "*" else FORMATS[kind] for kind in types if kind != "constexpr"]
        self.block = struct.Struct("".join(["@", *formats, "QQ"]))
        self.size = ctypes.c_size_t(self.block.size)

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: int,
        shape: tuple[int, int, int],
        launch: Any,
        before: Callable[[Any], object] | None,
        after: Callable[[Any], object] | None,
        *arguments: Any,
    ) -> None:
        """Launches x · y · z blocks. `shape`: warps per block, blocks per cluster (1), bytes of shared memory."""
        if not x * y * z:
            return
        self.cuda.ensure_context(current_device)
        if before:
            before(launch)
        values = [self.value(kind, argument, index) for index, (kind, argument) in self.given(arguments)]
        memory = (ctypes.c_char * self.block.size)()
        self.block.pack_into(memory, 0, *values, 0, 0)
        block = (PARAMETERS, ctypes.addressof(memory), PARAMETERS_SIZE, ctypes.addressof(self.size), None)
        extra = (ctypes.c_void_p * len(block))(*block)
        warps, _, shared = shape
        self.cuda(
            "cuLaunchKernel",
            *(ctypes.c_void_p(function), x, y, z, 32 * warps, 1, 1, shared, ctypes.c_void_p(stream), None, extra),
        )
        if after:
            after(launch)

    def given(self, arguments: tuple[Any, ...]) -> Iterator[tuple[int, tuple[str, Any]]]:
        """The arguments that reach the kernel, each with its index and type."""
        pairs = enumerate(leaves(self.signature, arguments))
        return ((index, pair) for index, pair in pairs if pair[0] != "constexpr")

    def value(self, kind: str, argument: Any, index: int) -> int | float:
        """The number that is packed for an argument."""
        if kind[0] == "*":
            return self.cuda.device_address(argument, index)
        if kind == "bf16":
            return int(struct.unpack("<I", struct.pack("<f", argument))[0]) >> 16
        number: int | float = argument
        return number


def leaves(kinds: Iterable[Any], arguments: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Types and arguments, with nested tuples flattened."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from leaves(kind, argument)
        else:
            yield kind, argument


def refuse_what_is_missing(types: Iterable[str], metadata: Any) -> None:
    """Raises RuntimeError if a kernel of these types and this metadata cannot be launched here."""
    wants = {
        "a cluster of blocks": metadata.num_ctas != 1,
        "a cooperative grid": metadata.launch_cooperative_grid,
        "a dependent launch": metadata.launch_pdl,
        "scratch memory": metadata.global_scratch_size or metadata.profile_scratch_size,
        "tensor descriptors": any(kind.startswith(("tensordesc", "nvTmaDesc")) for kind in types),
    }
    if missing := [what for what, wanted in wants.items() if wanted]:
        wanted = ", ".join(missing)
        raise RuntimeError(
            f"Triton kernel {metadata.name}: expected one that a V100 can run, got one that wants {wanted}. "
            "Triton's own launchers may know how; they need gcc and Python's headers"
        )


def current_device() -> int:
    """PyTorch's current device."""
    import torch

    return torch.cuda.current_device()
