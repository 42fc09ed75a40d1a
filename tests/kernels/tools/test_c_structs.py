"""Structs that are read from headers are those that the compiler sees."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.tools import c_structs
from kernels.tools.c_structs import CUDA, filled, headers, struct, structs


@pytest.fixture
def header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own header, instead of all others."""
    path = tmp_path / "args.h"
    monkeypatch.setattr(c_structs, "headers", lambda: [path])
    monkeypatch.setattr(c_structs, "structs", structs.__wrapped__)
    return path


def test_sizes_and_offsets_are_the_compilers(cuda_home: Path, tmp_path: Path) -> None:
    lines = [f'#include "{path}"' for path in headers()] + ["#include <cstdio>", "int main() {"]
    expected = []
    for name, made in structs().items():
        offsets = [f"offsetof(voltserve::{name}, {field})" for field, *_ in made._fields_]
        values = ", ".join([f"sizeof(voltserve::{name})", *offsets])
        lines.append(f'  std::printf("{name}{" %zu" * (1 + len(offsets))}\\n", {values});')
        expected.append(
            " ".join(map(str, [name, ctypes.sizeof(made), *(getattr(made, f).offset for f, *_ in made._fields_)]))
        )
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text("\n".join([*lines, "}"]))
    include = [f"-I{CUDA.parent}", "-isystem", str(cuda_home / "include")]
    subprocess.run(["g++", "-std=c++17", *include, source, "-o", program], check=True)
    assert len(expected) >= 13
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines() == expected


def test_tensors_stand_for_their_addresses() -> None:
    x, y = torch.zeros(4), torch.zeros(2)
    args = filled("SiluArgs", x=x, y=y, m=1, n=2)
    assert (args.x, args.y, args.m, args.n) == (x.data_ptr(), y.data_ptr(), 1, 2)
    assert filled("SiluArgs", x=None, y=y, m=1, n=2).x is None


@pytest.mark.parametrize("fields", [{"x": None, "y": None, "m": 1}, {"x": None, "y": None, "m": 1, "n": 2, "o": 3}])
def test_a_missing_or_unknown_field_is_refused(fields: dict[str, int | None]) -> None:
    with pytest.raises(TypeError, match="SiluArgs: expected x, y, m, n; got x, y, m"):
        filled("SiluArgs", **fields)


def test_every_kind_of_declaration_is_read(header: Path) -> None:
    header.write_text(
        "constexpr int kMost = 3;\n"
        "enum class Way { here, there };\n"
        "struct Inner {\n  bool flag;  // struct Comment {\n};\n"
        "struct Outer {\n"
        "  const __half *x, *y;  // two, of one type\n"
        "  const struct uint4 *codes;\n"
        "  unsigned char *to[kMost];\n"
        "  const char *reason;\n"
        "  Inner inner;\n"
        "  Way way;\n"
        "  int64_t rows;\n"
        "\n  VOLTSERVE_BOTH constexpr int twice() const { return 2; }\n"
        "};\n"
    )
    kinds = dict(c_structs.struct("Outer")._fields_)  # type: ignore[arg-type]
    assert list(kinds) == ["x", "y", "codes", "to", "reason", "inner", "way", "rows"]
    assert ctypes.sizeof(kinds["to"]) == 3 * ctypes.sizeof(ctypes.c_void_p)
    assert (kinds["reason"], kinds["way"], kinds["rows"]) == (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)


@pytest.mark.parametrize("line", ["std::vector<int> sizes;", "int (*call)(int);"])
def test_a_declaration_that_is_not_understood_is_refused(header: Path, line: str) -> None:
    header.write_text(f"struct Args {{\n  {line}\n}};\n")
    with pytest.raises(ValueError, match="Args: expected `type field, …;`, got `"):
        c_structs.struct("Args")


def test_an_unknown_struct_is_refused() -> None:
    with pytest.raises(KeyError, match="Nothing"):
        struct("Nothing")
