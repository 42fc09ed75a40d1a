"""The gate's machine code for sm_70: 16 bytes per access, silu in fp32, one rounded multiplication per pair."""

from perfmodel.sass_model import Instruction


def test_a_thread_moves_16_bytes_and_multiplies_rounded_halves(sass: dict[str, list[Instruction]]) -> None:
    (code,) = [code for name, code in sass.items() if "silu_and_mul_kernel" in name]
    names = [i.name for i in code]
    assert [name.startswith("LDG.E.128") for name in names if name.startswith("LDG")] == [True, True]  # gate and up
    assert [name.startswith("STG.E.128") for name in names if name.startswith("STG")] == [True]
    assert names.count("F2F.F16.F32") == 8  # each silu is rounded before it is multiplied
    assert names.count("HMUL2") == 4
    assert not any(name.startswith("HFMA2") for name in names)
