"""One file of vLLM as a module, without vLLM around it: its kernels are peers to compare with."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def load(vllm: Path, file: Path, stubs: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """`file` of the package folder `vllm`, which finds `stubs` (module of vllm -> what it holds) where it imports them.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = vllm / file
    if not path.is_file():
        raise FileNotFoundError(f"vllm: expected {file} in {vllm}, found none")
    before = {name: sys.modules.get(name) for name in ("vllm", *stubs)}
    sys.modules["vllm"] = parent = ModuleType("vllm")
    for name, values in stubs.items():
        stub = sys.modules[name] = ModuleType(name)
        vars(stub).update(values)
        setattr(parent, name.split(".")[1], stub)
    try:
        spec = importlib.util.spec_from_file_location(f"voltserve_peer_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"vllm: expected a Python file at {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, value in before.items():
            if value is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = value
    return module
