"""The cache update's machine code for sm_70: it copies 16 bytes per access, and computes nothing with them."""

import re

from perfmodel.sass_model import Instruction


def test_a_thread_copies_16_bytes_of_key_and_value(sass: dict[str, list[Instruction]]) -> None:
    (code,) = [code for name, code in sass.items() if "reshape_and_cache_kernel" in name]
    names = [i.name for i in code]
    assert sum(name.startswith("LDG.E.128") for name in names) == 2
    assert sum(name.startswith("STG.E.128") for name in names) == 2
    assert [name for name in names if re.match(r"HADD2|HMUL2|HFMA2|FADD|FMUL|F2F", name)] == []
