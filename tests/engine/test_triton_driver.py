from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from engine import triton_driver
from engine.triton_driver import Cuda, Launcher, Loader

FUNCTION, STREAM, ADDRESS = 0x7F00_1234_5678, 0x5500_1111_2222, 0x7E00_0000_0100
ON_HOST = 0x4000  # an address that the fake driver does not know


class FakeDriver:
    """libcuda: keeps what each function was called with, and the bytes of a launch's parameters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.parameters = b""
        self.context = 1
        self.shared_optin = 96 * 1024

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return 0

        return call

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuPointerGetAttribute(self, found: Any, _: int, address: ctypes.c_uint64) -> int:
        if address.value == ON_HOST:
            return 1
        found._obj.value = address.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _: int) -> int:
        value._obj.value = self.shared_optin if attribute == 97 else attribute
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, _: Any) -> int:
        value._obj.value = {0: 1024, 1: 1000, 3: 64, 4: 40}[attribute]
        return 0

    def cuModuleLoadData(self, _: Any, image: bytes) -> int:
        return 0 if image.startswith(b"\x7fELF") else 200

    def cuGetErrorString(self, _: int, name: Any) -> int:
        name._obj.value = b"device kernel image is invalid"
        return 0

    def cuLaunchKernel(self, *arguments: Any) -> int:
        self.calls.append(("cuLaunchKernel", arguments[:-2]))
        kind, pointer, size_kind, size_pointer, end = arguments[-1]
        assert (kind, size_kind, end) == (1, 2, None)
        self.parameters = ctypes.string_at(pointer, ctypes.c_size_t.from_address(size_pointer).value)
        return 0


def metadata(**changes: Any) -> SimpleNamespace:
    plain = {"name": "kernel", "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
    return SimpleNamespace(**{**plain, "global_scratch_size": 0, "profile_scratch_size": 0, **changes})


def launch(
    driver: FakeDriver, signature: dict[str, Any], *arguments: Any, grid: tuple[int, int, int] = (2, 3, 4)
) -> None:
    launcher = Launcher(Cuda(driver), SimpleNamespace(signature=signature), metadata())
    launcher(*grid, STREAM, FUNCTION, (4, 1, 2048), None, None, None, *arguments)


def tensor(address: int) -> SimpleNamespace:
    return SimpleNamespace(data_ptr=lambda: address)


def test_parameters_lie_as_the_fields_of_a_c_struct() -> None:
    class Expected(ctypes.Structure):
        _fields_ = (
            *(("x", ctypes.c_uint64), ("flag", ctypes.c_int8), ("count", ctypes.c_int32), ("half", ctypes.c_uint16)),
            *(("stride", ctypes.c_int64), ("scale", ctypes.c_float), ("exact", ctypes.c_double)),
            *(("brain", ctypes.c_uint16), ("mask", ctypes.c_uint8), ("none", ctypes.c_uint64)),
            *(("global_scratch", ctypes.c_uint64), ("profile_scratch", ctypes.c_uint64)),
        )

    driver = FakeDriver()
    types = ["*fp16", "i1", "i32", "constexpr", "fp16", "i64", "fp32", "fp64", "bf16", "u1", "*i32"]
    signature = {f"argument{index}": kind for index, kind in enumerate(types)}
    launch(driver, signature, tensor(ADDRESS), True, -7, 128, 1.5, -(2**40), 0.1, 0.1, 1.0, False, None)

    half, brain = struct.unpack("H", struct.pack("e", 1.5))[0], 0x3F80
    expected = Expected(ADDRESS, 1, -7, half, -(2**40), 0.1, 0.1, brain, 0, 0, 0, 0)
    got = Expected.from_buffer_copy(driver.parameters)
    fields = [name for name, _ in Expected._fields_]
    assert [getattr(got, name) for name in fields] == [getattr(expected, name) for name in fields]
    assert len(driver.parameters) == ctypes.sizeof(Expected)


def test_a_launch_has_the_grid_the_warps_the_shared_memory_and_the_stream() -> None:
    driver = FakeDriver()
    launch(driver, {"x": "*fp32"}, tensor(ADDRESS))
    ((name, given),) = driver.calls
    assert name == "cuLaunchKernel"
    assert [getattr(one, "value", one) for one in given] == [FUNCTION, 2, 3, 4, 4 * 32, 1, 1, 2048, STREAM]


def test_arguments_in_tuples_are_parameters_of_their_own() -> None:
    driver = FakeDriver()
    launch(driver, {"pair": ("*fp16", ("constexpr", "i32")), "n": "i32"}, (tensor(ADDRESS), (1, 5)), 6)
    assert driver.parameters[:16] == struct.pack("@Qii", ADDRESS, 5, 6)


def test_no_block_is_no_launch() -> None:
    driver = FakeDriver()
    launch(driver, {"x": "*fp32"}, tensor(ADDRESS), grid=(0, 1, 1))
    assert driver.calls == []


def test_a_tensor_on_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at 1\) cannot be accessed"):
        launch(FakeDriver(), {"n": "i32", "x": "*fp32"}, 3, tensor(ON_HOST))


@pytest.mark.parametrize(
    ("changes", "signature", "wanted"),
    [
        ({"num_ctas": 2}, {}, "a cluster of blocks"),
        ({"launch_cooperative_grid": True}, {}, "a cooperative grid"),
        ({"launch_pdl": True}, {}, "a dependent launch"),
        ({"global_scratch_size": 16}, {}, "scratch memory"),
        ({}, {"x": "tensordesc<fp16[64,64]>"}, "tensor descriptors"),
    ],
)
def test_what_only_later_gpus_have_is_refused_by_name(
    changes: dict[str, Any], signature: dict[str, str], wanted: str
) -> None:
    with pytest.raises(RuntimeError, match=f"kernel: expected .* wants {wanted}"):
        Launcher(Cuda(FakeDriver()), SimpleNamespace(signature=signature), metadata(**changes))


def test_hooks_see_a_launch() -> None:
    seen: list[tuple[str, str]] = []
    launcher = Launcher(Cuda(FakeDriver()), SimpleNamespace(signature={}), metadata())
    hooks = [lambda data, when=when: seen.append((when, data)) for when in ("before", "after")]
    launcher(1, 1, 1, STREAM, FUNCTION, (4, 1, 0), "data", *hooks)
    assert seen == [("before", "data"), ("after", "data")]


def test_a_thread_without_a_context_gets_one() -> None:
    driver = FakeDriver()
    driver.context = 0
    Cuda(driver).ensure_context(lambda: 1)
    assert [name for name, _ in driver.calls] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.calls[0][1][1] == 1


@pytest.mark.parametrize(("shared", "asked"), [(48 * 1024, []), (48 * 1024 + 1, [96 * 1024 - 1000])])
def test_a_kernel_asks_for_much_shared_memory_only_where_it_needs_it(shared: int, asked: list[int]) -> None:
    driver = FakeDriver()
    loaded = Loader(Cuda(driver)).load_binary("kernel", b"\x7fELF", shared, 0)
    assert loaded[2:] == (40, 16, 1024)
    assert [arguments[2] for name, arguments in driver.calls if name == "cuFuncSetAttribute"] == asked


def test_an_error_of_the_driver_is_raised_with_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData: device kernel image is invalid \(200\)"):
        Loader(Cuda(FakeDriver())).load_binary("kernel", b"no machine code", 0, 0)


def test_a_compiler_without_pythons_headers_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert triton_driver.compiler({"CC": "/usr/bin/gcc"}) == ""
    (tmp_path / "Python.h").touch()
    assert triton_driver.compiler({"CC": "/usr/bin/gcc"}) == "/usr/bin/gcc"
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert triton_driver.compiler({}) == ""
