"""The text that `voltserve verify` and `voltserve inspect` print for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quant.formats.others import ON

if TYPE_CHECKING:
    from quant.inspect import Summary
    from quant.verify import Finding, Report

_SEVERITIES = ("error", "warning", "info")


def verification_text(report: "Report") -> str:
    """The findings, worst first, over which sizes the model splits, and the verdict in the last line."""
    lines = [
        f"{report.directory}: {report.scheme.format if report.scheme else 'no NVFP4 format'}, "
        f"{_linears(len(report.modules.nvfp4), len(report.modules.fp8))}, {len(report.tensors)} tensors"
    ]
    for severity in _SEVERITIES:
        lines += [_finding_text(finding) for finding in report.findings if finding.severity == severity]
    for size, found in report.obstacles.items():
        if size > 1:
            lines.append(f"TP={size} works" if not found else str(found[0]))
            lines += [str(other) for other in found[1:]]
    lines.append(f"{'can' if report.ok else 'cannot'} be served on {ON[report.target.device]}")
    looked = "headers only" if report.depth == "headers" else f"every byte, {report.hashed} sha256 digests compared"
    counts = ", ".join(f"{_count(report.findings, severity)} {severity}s" for severity in _SEVERITIES[:2])
    lines.append(f"{'ok' if report.ok else 'NOT ok'}: {counts} ({looked})")
    return "\n".join(lines)


def _linears(nvfp4: int, fp8: int) -> str:
    return f"{nvfp4} NVFP4 linears" + (f", {fp8} FP8 linears" if fp8 else "")


def _finding_text(finding: "Finding") -> str:
    return f"{finding.severity}: {finding.check}: {finding}"


def _count(findings: "Sequence[Finding]", severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)


def summary_text(summary: "Summary") -> str:
    """The directory's content as aligned lines."""
    group = f", {summary.group_size} weights per block scale" if summary.group_size else ""
    rows = [
        ("model", f"{summary.directory} ({summary.architecture})"),
        ("format", f"{summary.format}{group}; activations {summary.activations}"),
        (
            "size",
            f"{_gigabytes(summary.bytes)} in {summary.shards} shards; {summary.parameters / 1e9:.3f} G parameters",
        ),
        ("layers", f"{summary.layers} decoder layers, {_linears(summary.linears, summary.fp8_linears)}"),
        *([("experts", summary.experts)] if summary.experts else []),
    ]
    rows += [
        ("" if number else "bytes", f"{_gigabytes(size):>10}  {kind}")
        for number, (kind, size) in enumerate(summary.bytes_by_kind.items())
    ]
    rows += [
        ("" if number else "linears", f"{count:>4} x {shape}")
        for number, (shape, count) in enumerate(summary.shapes.items())
    ]
    rows.append(("16-bit", ", ".join(summary.kept_modules) or "none"))
    rows += [(f"TP={size}", text.removeprefix(f"TP={size}: ")) for size, text in summary.tensor_parallel.items()]
    if summary.problems:
        rows.append(("problems", f"{summary.problems}: run `voltserve verify {summary.directory}`"))
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f} GB" if size >= 1e8 else f"{size / 1e6:.3f} MB"
