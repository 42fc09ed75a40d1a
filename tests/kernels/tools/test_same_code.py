"""Two listings of machine code are compared kernel by kernel."""

from __future__ import annotations

import pytest

from kernels.tools.same_code import differences, functions


def listing(*kernels: tuple[str, str]) -> str:
    parts = [f"\t\tFunction : {name}\n\t.headerflags @x\n{body}\n\t\t..........\n\n" for name, body in kernels]
    return "Fatbin elf code:\n" + "".join(parts)


def test_each_kernel_has_its_instructions() -> None:
    found = functions(listing(("_Z1av", "  IADD3 R1 ;"), ("_Z1bv", "  EXIT ;")))
    assert list(found) == ["_Z1av", "_Z1bv"]
    assert "IADD3" in found["_Z1av"]
    assert "EXIT" not in found["_Z1av"]


def test_the_width_of_columns_is_no_difference() -> None:
    narrow, wide = (functions(listing(("_Z1av", f"  /*0000*/  EXIT ;{gap}/* 0x4d */"))) for gap in (" ", "     "))
    assert differences(narrow, wide) == []


def test_a_name_keeps_no_hash_of_its_source_file() -> None:
    before, after = (
        functions(listing((f"_ZN50_GLOBAL__N__{digest}_9_decode_cu_{digest}6kernelEv", "  EXIT ;")))
        for digest in ("0123abcd", "89efabcd")
    )
    assert differences(before, after) == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"a": "EXIT"}, []),
        ({"a": "NOP"}, ["a: EXIT became NOP"]),
        ({"a": "EXIT\nNOP"}, ["a:  became more or fewer instructions"]),
        ({}, ["a: vanished"]),
        ({"a": "EXIT", "b": "EXIT"}, ["b: new"]),
    ],
)
def test_each_difference_is_named(after: dict[str, str], expected: list[str]) -> None:
    assert differences({"a": "EXIT"}, after) == expected
