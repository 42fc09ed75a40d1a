"""Where the engine keeps what it compiled or found out: a folder per build, so that no build reads another's files.

vLLM, Triton and torch key most of their files by their own versions and sources, none by ours. vLLM keys its probe of
peer access by the visible GPUs alone. A volume outlives an upgrade and a rollback; so does a home folder.
"""

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

# Each variable's folder in the build's. torch's default is in /tmp, the others' below ~/.cache.
FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
DISTRIBUTIONS = ("voltserve", "voltserve-kernels", "vllm", "torch", "triton")
KERNELS = "voltserve-kernels"
SOURCES = ("engine", "kernels", "quant")  # packages that engines import
ROOT = Path(__file__).parents[2]


def cache_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that lead to this build's folder; none where the environment names neither a cache nor a home."""
    home = environ.get("HOME")
    cache_home = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    if not cache_home:
        return {}
    folder = f"{cache_home}/voltserve/build-{this_build()}"
    return {variable: f"{folder}/{name}" for variable, name in FOLDERS.items()}


@cache
def this_build() -> str:
    """Names what is installed here."""
    versions = [f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in DISTRIBUTIONS)]
    return build_of([*versions, _files_of(KERNELS)], [ROOT / name for name in SOURCES])


def build_of(facts: Iterable[str], folders: Iterable[Path]) -> str:
    """Names a build: the same for the same facts and the same Python files in `folders`."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(f"{len(fact)} {fact}".encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder.parent)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _files_of(name: str) -> str:
    """The digests of an installed distribution's files."""
    try:
        return importlib.metadata.distribution(name).read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
