"""Verifies a model directory: finds every fault that can be known before a byte reaches a GPU. Torch-free."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quant.errors import QuantError
from quant.formats.scheme import Scheme
from quant.progress import OnProgress, ignore_progress
from quant.verify.files import Tensor
from quant.verify.findings import Finding, error, from_exception, list_some, warning
from quant.verify.layers import Modules, compare_globals
from quant.verify.manifest import FILE_NAME as MANIFEST
from quant.verify.manifest import listable, read_manifest, write_manifest
from quant.verify.outline import holes_of
from quant.verify.servable import Target, examine
from quant.verify.tensor_parallel import Obstacle
from quant.verify.values import check_zeros, is_positive, scan_files

# headers: reads names, sizes, headers, configs and global scales. full: reads every byte.
Depth = Literal["headers", "full"]

V100S = Target("volta")
_AGAIN = "Download the file again"


@dataclass(frozen=True)
class Report:
    """The result of a verification. `obstacles`: per tensor-parallel size; empty for a size that works.

    `hashed`: the number of files whose digests were compared. `scheme` is None for 16-bit models, and if unknown.
    """

    directory: Path
    depth: Depth
    target: Target
    scheme: Scheme | None
    modules: Modules
    tensors: Mapping[str, Tensor]
    findings: tuple[Finding, ...]
    obstacles: Mapping[int, list[Obstacle]]
    hashed: int

    @property
    def ok(self) -> bool:
        """Whether nothing forbids serving."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "directory": str(self.directory),
            "ok": self.ok,
            "depth": self.depth,
            "device": self.target.device,
            "format": self.scheme.format if self.scheme else None,
            "group_size": self.scheme.group_size if self.scheme and self.modules.nvfp4 else None,
            "linears": len(self.modules.nvfp4),
            "fp8_linears": len(self.modules.fp8),
            "tensors": len(self.tensors),
            "bytes": sum(tensor.entry.end - tensor.entry.start for tensor in self.tensors.values()),
            "digests_compared": self.hashed,
            "tensor_parallel": {str(size): [str(one) for one in found] for size, found in self.obstacles.items()},
            "findings": [finding.as_dict() for finding in self.findings],
        }


def verify(
    directory: Path,
    depth: Depth = "full",
    *,
    target: Target = V100S,
    manifest: Literal["check", "write"] = "check",
    on_progress: OnProgress = ignore_progress,
) -> Report:
    """Verifies the model in `directory`, in whatever state. Its faults are in the report.

    `target`: where it is to be served. `manifest`: "check" compares with SHA256SUMS, if the file exists and the depth
    is full. "write" writes it again, unless the model has an error.

    Of an outline no value is read. Raises QuantError if `directory` is not a directory, and for depth "full" of an
    outline; ValueError for "write" without "full".
    """
    if manifest == "write" and depth != "full":
        raise ValueError("manifest: expected depth 'full' to write it, got 'headers'")
    seen = examine(directory, target)
    holes = holes_of(directory)
    if holes and depth == "full":
        raise QuantError(f"{directory}: expected the whole model, got its outline", "Ask for the headers only")
    modules, tensors, headers = seen.modules, seen.tensors, seen.headers
    findings = list(seen.findings)
    globals_ = {} if holes else _read_globals(directory, modules, tensors)
    findings += compare_globals(modules, globals_)
    hashed = 0
    if depth == "full":
        shards = {name: tensor.shard for name, tensor in tensors.items()}
        digests = _read_manifest(directory, findings) if manifest == "check" else {}
        names = (
            listable(directory)
            if manifest == "write"
            else sorted(digests.keys() & set(listable(directory)) | headers.keys())
        )
        scan = scan_files(
            directory, names, headers, hashed=bool(digests) or manifest == "write", on_progress=on_progress
        )
        findings += scan.findings + check_zeros(modules, globals_, scan.all_zero, shards)
        findings += _compare_digests(directory, digests, scan.digests, headers)
        hashed = len(digests.keys() & scan.digests.keys())
        if manifest == "write" and not any(finding.severity == "error" for finding in findings):
            write_manifest(directory, scan.digests)
    else:
        findings += _suspicious_globals(modules, globals_, tensors)
    return Report(directory, depth, target, seen.scheme, modules, tensors, tuple(findings), seen.obstacles, hashed)


def _read_globals(directory: Path, modules: Modules, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Each NVFP4 linear's global scale as stored (four bytes each)."""
    by_shard: dict[str, list[tuple[int, str]]] = {}
    for module, (*_, layout) in modules.nvfp4.items():
        tensor = tensors[f"{module}.{layout.global_scale}"]
        by_shard.setdefault(tensor.shard, []).append((tensor.offset, module))
    values = {}
    for shard, places in by_shard.items():
        with (directory / shard).open("rb") as file:
            for offset, module in sorted(places):
                file.seek(offset)
                (values[module],) = struct.unpack("<f", file.read(4))
    return values


def _suspicious_globals(
    modules: Modules, globals_: Mapping[str, float], tensors: Mapping[str, Tensor]
) -> Iterable[Finding]:
    for module, value in globals_.items():
        if not is_positive(value):
            name = f"{module}.{modules.nvfp4[module][3].global_scale}"
            got = f"{value}, which only an all-zero weight may carry"
            remedy = "Verify without --headers: that reads the weights"
            yield warning("global-scale", tensors[name].shard, name, "a positive number", got, remedy)


def _read_manifest(directory: Path, findings: list[Finding]) -> dict[str, str]:
    try:
        return read_manifest(directory)
    except QuantError as caught:
        findings.append(from_exception("manifest", caught))
        return {}


def _compare_digests(
    directory: Path, expected: Mapping[str, str], got: Mapping[str, str], headers: Mapping[str, object]
) -> Iterable[Finding]:
    for name, digest in expected.items():
        if name not in got:
            yield error("sha256", name, "", f"a file, which {MANIFEST} lists", "nothing", "Download the missing file")
        elif got[name] != digest:
            yield error("sha256", name, "", f"sha256 {digest}", got[name], _AGAIN)
    if unlisted := sorted(headers.keys() - expected.keys()) if expected else []:
        remedy = "Write the manifest anew with --write-manifest, if these files are meant to be there"
        yield warning("sha256", unlisted[0], "", f"all shards in {MANIFEST}", f"none for {list_some(unlisted)}", remedy)
