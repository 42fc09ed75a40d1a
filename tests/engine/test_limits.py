"""Limits that Python checks before it chooses a kernel, against the sources that set them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine import limits

KERNELS = Path(__file__).parents[2] / "kernels"


def constant(path: str, name: str) -> int:
    """The value of `constexpr int name = value` in a source, also as one of several."""
    found = re.search(rf"constexpr int [^;]*\b{name} = (\d+)", (KERNELS / path).read_text())
    assert found, f"{path}: {name}"
    return int(found[1])


@pytest.mark.parametrize(
    ("limit", "path", "name"),
    [
        (limits.DECODE_TOKENS, "cuda/attention/plan.h", "kDecodeTokens"),
        (limits.NORM_MULTIPLE, "cuda/norm/args.h", "kNormNumbers"),
        (limits.NORM_MAX, "cuda/norm/args.h", "kMaxHidden"),
        (limits.CONV_TAPS, "contracts/gdn.h", "kConvTaps"),
        (limits.DECODER_HEAD_MULTIPLE, "contracts/attention.h", "kHeadUnit"),
        (limits.DECODER_MAX_HEAD, "contracts/attention.h", "kMaxHeadDim"),
        (limits.PAGE_MULTIPLE, "contracts/attention.h", "kPageUnit"),
    ],
)
def test_a_limit_is_the_kernels(limit: int, path: str, name: str) -> None:
    assert limit == constant(path, name)
