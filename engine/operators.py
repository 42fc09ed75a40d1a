"""The operators that vLLM's Python calls and its own compiled code would define: where each comes from here.

vLLM is installed without compiled code. Its modules still name operators of `torch.ops._C` and others, some of them at
import. `TABLE` lists each one on our path, with its schema as vLLM calls it and what computes it. `install` defines
them before vLLM is imported, and puts empty modules in the place of vLLM's libraries.

An operator that is only named (`NAMED`) has a schema and no code, since passes that never run here mention it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

# vLLM's libraries, which its modules import for their side effects.
LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")


@dataclass(frozen=True)
class Operator:
    """One operator: `namespace::schema`, and the function that computes it on any device; None if it is only named."""

    namespace: str
    schema: str
    compute: Callable[..., Any] | None

    @property
    def name(self) -> str:
        """The operator's name without its namespace."""
        return self.schema.partition("(")[0]


def _nothing(*_: Any) -> None:
    """For what has no meaning here: memory policies of NUMA nodes."""


def _slots(
    query_start: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    """slots[t] = block_table[r][p // B] * B + p % B for the token t of request r at position p = positions[t].

    query_start int32 [R + 1]; positions int64 [T]; block_table int32 [at least R, any]; slots int64, written up to T.
    """
    counts = query_start.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = positions[: len(requests)]
    blocks = block_table[requests, at // block_size].long()
    slots[: len(requests)] = blocks * block_size + at % block_size


def _rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin: torch.Tensor,
    halves: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates query [T, H D] and key [T, H_kv D] in place.

    cos_sin [positions, R] holds R / 2 cosines, then as many sines. Angle i rotates dimensions i and i + R / 2 of a head
    (`halves`), or 2 i and 2 i + 1, counted from `rope_dim_offset` on.
    """
    cos, sin = cos_sin[positions.flatten()].chunk(2, dim=-1)
    if inverse:
        sin = -sin
    cos, sin = cos[:, None], sin[:, None]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., rope_dim_offset : rope_dim_offset + cos_sin.shape[1]]
        first, second = rotated.chunk(2, dim=-1) if halves else (rotated[..., ::2], rotated[..., 1::2])
        a, b = first.clone(), second.clone()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def _gated(activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """out [..., I] = activate(x's first half) * x's second half, x [..., 2 I]."""

    def compute(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(activate(gate), up, out=out)

    return compute


def _clamped_silu(out: torch.Tensor, x: torch.Tensor, limit: float, alpha: float, beta: float) -> None:
    """out = g sigmoid(alpha g) (u + beta), g and u being x's halves, g at most `limit`, u between -limit and limit."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.mul(gate * torch.sigmoid(alpha * gate), up + beta, out=out)


def _swiglu_oai(out: torch.Tensor, x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """gpt-oss's gated activation: gate and up alternate in x."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    torch.mul(gate * torch.sigmoid(alpha * gate), up + 1, out=out)


TABLE = (
    Operator("_C", "init_cpu_memory_env(SymInt[] nodes) -> ()", _nothing),
    Operator(
        "_C",
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, SymInt block_size) -> ()",
        _slots,
    ),
    Operator(
        "_C",
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        _rotate,
    ),
    Operator("_C", "silu_and_mul(Tensor(a!) result, Tensor input) -> ()", _gated(functional.silu)),
    Operator("_C", "gelu_and_mul(Tensor(a!) out, Tensor input) -> ()", _gated(functional.gelu)),
    Operator(
        "_C",
        "gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()",
        _gated(partial(functional.gelu, approximate="tanh")),
    ),
    Operator(
        "_C",
        "silu_and_mul_with_clamp(Tensor(a!) result, Tensor input, float limit, float alpha, float beta) -> ()",
        _clamped_silu,
    ),
    Operator(
        "_C",
        "swigluoai_and_mul(Tensor(a!) out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
        _swiglu_oai,
    ),
)


class _Empty(importlib.abc.Loader):
    """Loads a module without content."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _InPlaceOfLibraries(importlib.abc.MetaPathFinder):
    """Finds empty modules under the names of vLLM's libraries."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _Empty()) if name in LIBRARIES else None


@cache
def install() -> None:
    """Defines the operators and the empty modules. A second call does nothing."""
    sys.meta_path.insert(0, _InPlaceOfLibraries())
    for operator in TABLE:
        library = _library(operator.namespace)
        library.define(operator.schema)
        if operator.compute is not None:
            library.impl(operator.name, operator.compute, "CompositeExplicitAutograd")


@cache
def _library(namespace: str) -> torch.library.Library:
    """Kept for the life of the process: operators vanish with their library."""
    return torch.library.Library(namespace, "FRAGMENT")
