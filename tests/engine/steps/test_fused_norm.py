"""The norm's pattern: what it replaces, with what, and what it leaves; and which all-reduce is called."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve
from torch import fx
from vllm.distributed import parallel_state

from engine import ops
from engine.steps import fused_norm, pattern

OPS: Any = torch.ops
HIDDEN = 64


def vllm_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Stands for vLLM's operator, which only its compiled kernels define."""


def vllm_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As above."""


vllm_add._qualified_op_name = "_C::fused_add_rms_norm"  # type: ignore[attr-defined]
vllm_norm._qualified_op_name = "_C::rms_norm"  # type: ignore[attr-defined]


class Recorded:
    """A recorded step, or a part of one."""

    def __init__(self, dtype: torch.dtype = torch.float16, hidden: int = HIDDEN) -> None:
        self.graph = fx.Graph()
        self.like, self.weight_like = torch.empty(3, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
        self.x, self.residual = self.given("x", self.like), self.given("residual", self.like)
        self.weight = self.given("weight", self.weight_like)
        self.next = [self.graph.placeholder(name) for name in ("packed", "scales", "row_factor")]

    def given(self, name: str, like: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = like
        return node

    def call(self, function: Any, *arguments: Any, **named: Any) -> fx.Node:
        node = self.graph.call_function(function, arguments, named)
        node.meta["example_value"] = self.like
        return node

    def product(self, x: fx.Node) -> fx.Node:
        return self.call(OPS.voltserve.nvfp4_linear, x, *self.next, 16)

    def added(self, x: fx.Node) -> None:
        """The addition and norm, then a GEMM of the norm and a reader of the sum."""
        self.call(vllm_add, x, self.residual, self.weight, 1e-6)
        self.graph.output((self.product(x), self.residual))

    def fused(self) -> pattern.Fused:
        done = fused_norm.PATTERN.apply(self.graph)
        self.graph.lint()
        return done

    def targets(self) -> list[Any]:
        return [node.target for node in self.graph.nodes if node.op == "call_function"]


def test_addition_and_norm_become_one_operation() -> None:
    step = Recorded()
    step.added(step.x)
    assert step.fused() == pattern.Fused(1)
    assert step.targets() == [ops.add_rms_norm, OPS.voltserve.nvfp4_linear]
    made, product = (node for node in step.graph.nodes if node.op == "call_function")
    assert made.args == (step.x, step.residual, step.weight, 1e-6)
    assert product.args[0] is made


@pytest.mark.parametrize("named", [False, True])
def test_an_all_reduce_before_them_goes_along(named: bool) -> None:
    step = Recorded()
    group: dict[str, Any] = {"group_name": "tp:0"} if named else {}
    total = step.call(parallel_state.all_reduce, step.x, *([] if named else ["tp:0"]), **group)
    step.added(total)
    assert step.fused() == pattern.Fused(1)
    assert step.targets() == [ops.all_reduce_add_rms_norm, OPS.voltserve.nvfp4_linear]
    made, _ = (node for node in step.graph.nodes if node.op == "call_function")
    assert made.args == (step.x, step.residual, step.weight, 1e-6, "tp:0")


def test_an_all_reduce_is_found_behind_a_slice_that_is_all_of_it() -> None:
    """As experts end."""
    step = Recorded()
    total = step.call(parallel_state.all_reduce, step.x, "tp:0")
    step.added(step.call(operator.getitem, total, (..., slice(None, HIDDEN))))
    assert step.fused() == pattern.Fused(1)
    assert step.targets() == [ops.all_reduce_add_rms_norm, OPS.voltserve.nvfp4_linear]


def test_of_a_part_of_a_sum_only_the_norm_is_fused() -> None:
    step = Recorded()
    total = step.call(parallel_state.all_reduce, step.x, "tp:0")
    total.meta["example_value"] = torch.empty(3, 2 * HIDDEN, dtype=torch.float16)
    step.added(step.call(operator.getitem, total, (slice(None), slice(None, HIDDEN))))
    assert step.fused() == pattern.Fused(1)
    functions = [parallel_state.all_reduce, operator.getitem, ops.add_rms_norm, OPS.voltserve.nvfp4_linear]
    assert step.targets() == functions


def test_rows_with_gaps_between_them_stay() -> None:
    step = Recorded()
    step.x.meta["example_value"] = torch.empty(3, 2 * HIDDEN, dtype=torch.float16)[:, :HIDDEN]
    step.added(step.x)
    assert step.fused() == pattern.Fused(0, ("expected rows without gaps",))


def test_the_first_layers_norm_is_one_operation_of_ours() -> None:
    step = Recorded()
    out = step.call(torch.empty_like, step.x)
    step.call(vllm_norm, out, step.x, step.weight, 1e-6)
    step.graph.output((step.product(out), step.x))
    assert step.fused() == pattern.Fused(1)
    assert step.targets() == [ops.add_rms_norm, OPS.voltserve.nvfp4_linear]
    made, _ = (node for node in step.graph.nodes if node.op == "call_function")
    assert made.args == (step.x, None, step.weight, 1e-6)


def test_a_norm_of_heads_is_left_to_others() -> None:
    step = Recorded()
    step.x.meta["example_value"] = torch.empty(3, 2, HIDDEN, dtype=torch.float16)
    out = step.call(torch.empty_like, step.x)
    step.call(vllm_norm, out, step.x, step.weight, 1e-6)
    step.graph.output((out,))
    assert step.fused() == pattern.Fused(0)


def test_a_sum_that_others_read_before_the_norm_stays() -> None:
    step = Recorded()
    total = step.call(parallel_state.all_reduce, step.x, "tp:0")
    step.call(torch.neg, total)
    step.added(total)
    before = step.targets()
    assert step.fused() == pattern.Fused(0, ("expected nothing else to read the sum before the norm does",))
    assert step.targets() == before


def test_a_view_of_what_others_read_stays() -> None:
    """They would read the norm instead."""
    step = Recorded()
    view = step.graph.call_method("view", (step.x, -1, HIDDEN))
    view.meta["example_value"] = step.like
    step.call(vllm_add, view, step.residual, step.weight, 1e-6)
    step.graph.output((view, step.x))
    assert step.fused() == pattern.Fused(0, ("expected nothing else to read the sum before the norm does",))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Recorded(torch.bfloat16), "expected float16, got torch.bfloat16, torch.bfloat16, torch.bfloat16"),
        (Recorded(hidden=60), "expected a width that is a multiple of 8 up to 16384, got 60"),
        (Recorded(hidden=16_392), "expected a width that is a multiple of 8 up to 16384, got 16392"),
    ],
)
def test_other_norms_are_left_and_told(step: Recorded, reason: str) -> None:
    step.added(step.x)
    assert step.fused() == pattern.Fused(0, (reason,))


@pytest.mark.parametrize("takes", [True, False])
def test_ours_sums_in_the_same_kernel_and_nccl_before_it(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    from engine.collective import communicator

    called: list[tuple[str, Any]] = []

    class Ours:
        def takes_rows(self, _x: torch.Tensor) -> bool:
            return takes

        def takes(self, _x: torch.Tensor) -> bool:
            return False

        def rms_norm(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            called.append(("ours", rest))
            return x

    class Nccl:
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            called.append(("nccl", ()))
            return 2 * x

    def norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        called.append((f"norm of {float(x[0, 0])}", rest))
        return x

    made: Any = communicator.VoltaCommunicator.__new__(communicator.VoltaCommunicator)
    made._ours = Ours()
    monkeypatch.setattr("engine.collective.communicator.CudaCommunicator.all_reduce", Nccl.all_reduce)
    monkeypatch.setattr(communicator, "add_rms_norm", norm)
    monkeypatch.setitem(parallel_state._groups, "tp:7", lambda: SimpleNamespace(device_communicator=made))
    x, residual, weight = torch.ones(1, HIDDEN), torch.zeros(1, HIDDEN), torch.ones(HIDDEN)
    ops.all_reduce_add_rms_norm(x, residual, weight, 1e-6, "tp:7")
    names = [name for name, _ in called]
    assert names == (["ours"] if takes else ["nccl", "norm of 2.0"])
    assert called[-1][1] == (residual, weight, 1e-6)
