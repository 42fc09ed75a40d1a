"""The C interface seen from Python: a library that was built from other sources is refused, not called."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from kernels.tools.native import ROOT, Library, load, structs


class _Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_double)]


class _Longer(ctypes.Structure):
    _fields_ = [*_Pair._fields_, ("third", ctypes.c_int)]


_Longer.__name__ = "_Pair"


def compiled(folder: Path, fields: str) -> Path:
    """A shared library whose interface has a struct Pair with `fields`."""
    source, library = folder / "api.cpp", folder / "api.so"
    source.write_text(
        f'#include "{ROOT}/kernels/cuda/common/c_structs.h"\n'
        f"namespace voltserve {{ struct Pair {{ {fields} }}; }}\n"
        "using voltserve::Pair;\n"
        'extern "C" const char *pair_structs() {\n'
        '  static const auto text = voltserve::describe("Pair", sizeof(Pair), {AT(Pair, first), AT(Pair, second)});\n'
        "  return text.c_str();\n"
        "}\n"
    )
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def test_structs_are_described_alike_in_both_languages(library: Library) -> None:
    assert library.variants()["mma2"] == 0  # loading it compared them


def test_a_library_with_the_same_structs_is_loaded(tmp_path: Path) -> None:
    path = compiled(tmp_path, "int first; double second;")
    assert load(path, {"pair_structs": [_Pair]})


@pytest.mark.parametrize("fields", ["double second; int first;", "int first; float second;"])
def test_a_library_with_another_struct_is_refused_by_name(tmp_path: Path, fields: str) -> None:
    path = compiled(tmp_path, fields)
    with pytest.raises(RuntimeError, match=r"api\.so: expected Pair 16: first 0, second 8; got Pair .*build_cuda\.sh"):
        load(path, {"pair_structs": [_Pair]})


@pytest.mark.parametrize("mirrored", [[_Longer], [_Pair, _Pair], []])
def test_python_with_other_structs_is_refused(tmp_path: Path, mirrored: list[type[ctypes.Structure]]) -> None:
    path = compiled(tmp_path, "int first; double second;")
    with pytest.raises(RuntimeError, match=r"expected .*; got .*built from other sources"):
        load(path, {"pair_structs": mirrored})


def test_a_library_that_says_nothing_of_its_structs_is_refused(tmp_path: Path) -> None:
    path = compiled(tmp_path, "int first; double second;")
    with pytest.raises(RuntimeError, match=r"expected voltserve_linear_structs\(\), not found"):
        Library(path)


def test_a_description_names_every_field() -> None:
    assert structs([_Pair]) == "Pair 16: first 0, second 8\n"
