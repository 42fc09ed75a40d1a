"""vLLM's source against our operators: every one that its Python calls is computed, or its absence has a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.operators import absent, check
from engine.operators.installation import NAMESPACES
from engine.operators.table import TABLE

COMPUTED = {f"{operator.namespace}.{operator.name}" for operator in TABLE}
# vLLM's libraries. Other names below torch.ops are operators that its Python defines.
OPERATOR = re.compile(r"\btorch\.ops\.(_(?:moe_|rocm_|xpu_|qutlass_)?C\w*)\.(\w+)")
CALL = re.compile(OPERATOR.pattern + r"(?:\.default)?")


class Call(NamedTuple):
    name: str
    place: str
    given: int
    keywords: tuple[str, ...]


@cache
def sources() -> dict[Path, str]:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return {path: text for path in root.rglob("*.py") if "torch.ops." in (text := path.read_text(encoding="utf-8"))}


@cache
def named() -> dict[str, str]:
    """Each operator that is named, and one place."""
    found = {}
    for path, text in sources().items():
        for match in OPERATOR.finditer(text):
            found[f"{match[1]}.{match[2]}"] = f"{path.name}:{text[: match.start()].count(chr(10)) + 1}"
    return found


def calls() -> Iterator[Call]:
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (match := CALL.fullmatch(ast.unparse(node.func))):
                starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                if not starred and match[2] != "default":
                    keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
                    yield Call(f"{match[1]}.{match[2]}", f"{path.name}:{node.lineno}", len(node.args), keywords)


def test_the_source_is_read() -> None:
    assert len(named()) > 200
    assert {"_C.rms_norm", "_moe_C.topk_softmax", "_C_cache_ops.swap_blocks", "_C.gelu_new"} <= set(named())


def test_every_operator_that_is_named_is_computed_or_has_a_reason() -> None:
    reasons = {name: [one for one in absent.ABSENT if one.has(name)] for name in set(named()) - COMPUTED}
    unknown = {name: named()[name] for name, found in reasons.items() if not found}
    assert not unknown, "put these into engine/operators/table.py, or with a reason into absent.py"
    assert not {name: found for name, found in reasons.items() if len(found) > 1}, "one reason each"


def test_no_reason_is_left_over() -> None:
    patterns = [pattern for one in absent.ABSENT for pattern in one.names]
    assert not [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in named())]
    assert not {name for name in COMPUTED if any(one.has(name) for one in absent.ABSENT)}
    assert not COMPUTED - set(named()), "vLLM names these no more"


def test_each_call_fits_its_schema() -> None:
    """By the number of arguments. vLLM's types are checked where its layers are run, in the other tests."""
    wrong, seen = [], set()
    for call in calls():
        if call.name not in COMPUTED or "**" in call.keywords:
            continue
        seen.add(call.name)
        namespace, name = call.name.split(".")
        arguments = getattr(getattr(torch.ops, namespace), name).default._schema.arguments
        missing = [
            argument.name
            for argument in arguments[call.given :]
            if not argument.has_default_value() and argument.name not in call.keywords
        ]
        unknown = set(call.keywords) - {argument.name for argument in arguments[call.given :]}
        if call.given > len(arguments) or missing or unknown:
            wrong.append((call, missing, unknown))
    assert not wrong
    assert len(seen) > 25


def test_what_the_check_refuses_is_absent() -> None:
    needed = {name for need in check.NEEDS for name in need.operators}
    assert needed <= set(named())
    assert not needed & COMPUTED
    # And what is said to be refused by the check, it refuses.
    told = {pattern for one in absent.ABSENT if "check.py" in one.reason for pattern in one.names}
    assert all(any(fnmatchcase(name, pattern) for pattern in told) for name in needed)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_an_absent_name_is_an_attribute_error_with_its_reason(namespace: str) -> None:
    assert not hasattr(getattr(torch.ops, namespace), "no_such_operator")
    with pytest.raises(AttributeError, match=rf"^{namespace}\.no_such_operator: vLLM calls"):
        _ = getattr(torch.ops, namespace).no_such_operator


def test_the_reason_says_what_to_do() -> None:
    with pytest.raises(AttributeError, match=r"_C\.gptq_gemm: .* is refused before .*`voltserve quantize`"):
        _ = torch.ops._C.gptq_gemm


def test_an_operator_that_is_only_named_says_why_it_computes_nothing() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(NotImplementedError, match=r"_C\.static_scaled_fp8_quant: .* tensor cores that a V100 lacks"):
        torch.ops._C.static_scaled_fp8_quant(x, x, x)
