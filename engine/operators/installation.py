"""Defines the operators before vLLM is imported, and replaces vLLM's libraries by empty modules.

vLLM is installed without compiled code. Its modules still name operators of `torch.ops._C` and others, some of them at
import.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import _OpNamespace

from engine.operators import absent
from engine.operators.table import TABLE

# vLLM's libraries, which its modules import for their side effects.
LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")
# The operators of these. A name that is not there says why.
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar")

# vLLM imports its functions wherever there is a GPU. They are for compute capability 8.0 and newer.
FLASH_ATTENTION = "vllm.vllm_flash_attn"


class Namespace(_OpNamespace):
    """`torch.ops._C` or its like. vLLM asks some names with hasattr, so an absent one stays an AttributeError."""

    def __getattr__(self, name: str) -> Any:
        """The operator. Raises AttributeError with the reason why it is absent."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("__"):
                raise
            raise AttributeError(absent.describe(f"{self.name}.{name}")) from error


class _Missing(types.ModuleType):
    """A module whose functions raise when they are called: they are absent here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: Any, **_options: Any) -> None:
            raise ImportError(f"{self.__name__}.{name}: vLLM's FlashAttention is not part of voltserve")

        return missing


class _StandIn(importlib.abc.Loader):
    """Loads a module without content of its own."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return _Missing(spec.name) if spec.name == FLASH_ATTENTION else None

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _InPlaceOfLibraries(importlib.abc.MetaPathFinder):
    """Finds stand-ins under the names of vLLM's libraries. FlashAttention's Python stays below its name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in LIBRARIES:
            return importlib.machinery.ModuleSpec(name, _StandIn())
        if name == FLASH_ATTENTION:
            spec = importlib.machinery.ModuleSpec(name, _StandIn(), is_package=True)
            spec.submodule_search_locations = [f"{folder}/vllm_flash_attn" for folder in path or ()]
            return spec
        return None


def _refusing(name: str) -> Callable[..., None]:
    """What computes an operator that is only named: nothing, said with its reason."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError(absent.describe(name))

    return refuse


@cache
def install() -> None:
    """Defines the operators and the empty modules. A second call does nothing."""
    sys.meta_path.insert(0, _InPlaceOfLibraries())
    for name in NAMESPACES:
        setattr(torch.ops, name, Namespace(name))
    for operator in TABLE:
        library = _library(operator.namespace)
        library.define(operator.schema)
        library.impl(operator.name, operator.compute, "CompositeExplicitAutograd")
    for schema in absent.NAMED:
        name = schema.partition("(")[0]
        _library("_C").define(schema)
        _library("_C").impl(name, _refusing(f"_C.{name}"), "CompositeExplicitAutograd")


@cache
def _library(namespace: str) -> torch.library.Library:
    """Kept for the life of the process: operators vanish with their library."""
    return torch.library.Library(namespace, "FRAGMENT")
