"""The C interface seen from Python: a library that was built from other sources is refused, not called."""

import subprocess
from pathlib import Path

import pytest

from kernels.tools.c_structs import digest
from kernels.tools.native import Library, load


def compiled(folder: Path, source: str) -> Path:
    """A shared library of one C source."""
    library = folder / "api.so"
    (folder / "api.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "api.c", "-o", library], check=True)
    return library


def built_with(headers: str) -> str:
    return f'const char *voltserve_headers() {{ return "{headers}"; }}'


def test_the_library_is_built_from_these_headers(library: Library) -> None:
    assert library.variants()["mma2"] == 0  # loading it compared them


def test_a_library_of_the_same_headers_is_loaded(tmp_path: Path) -> None:
    assert load(compiled(tmp_path, built_with(digest())))


def test_a_library_of_other_headers_is_refused(tmp_path: Path) -> None:
    other = "0123456789abcdef" * 4
    expected = rf"api\.so: expected headers of sha256 {digest()[:12]}…, got 0123456789ab…; .*build_cuda\.sh"
    with pytest.raises(RuntimeError, match=expected):
        load(compiled(tmp_path, built_with(other)))


def test_a_library_that_says_nothing_of_its_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"expected voltserve_headers\(\), not found; .*build_cuda\.sh"):
        Library(compiled(tmp_path, "int unrelated;"))
