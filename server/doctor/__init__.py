"""`voltserve doctor`: finds what will stop or slow an engine on this machine, before one is started. Works without a
GPU.

Reading and judging are separate: `nvml`, `pci`, `host`, `disk` and `trial` read; `gpu_findings`, `board` and `checks`
judge the readings.
"""

from collections.abc import Sequence
from pathlib import Path

from server.config.settings import engine_is_cpu_build
from server.doctor import nvml
from server.doctor.board import check_board
from server.doctor.checks import check_all_reduce, check_disk, check_engine, check_host, check_p2p
from server.doctor.disk import read_disk
from server.doctor.findings import Finding
from server.doctor.gpu_findings import check_gpus
from server.doctor.host import read_host
from server.doctor.pci import read_cards, read_kernel_log
from server.doctor.trial import ALL_REDUCE, P2P, run_trial

__all__ = ["Finding", "as_text", "examine"]

_MARKS = {"ok": "ok", "info": "info", "warning": "WARNING", "error": "ERROR"}


def examine(model: Path | None, host: str, port: int, start_timeout: float, *, quick: bool) -> tuple[Finding, ...]:
    """Looks at everything.

    Args:
        model: the model directory whose disk is measured, if any.
        host: the address that would be listened on.
        port: the port that would be listened on; 0 takes a free one.
        start_timeout: seconds within which the engine must be ready.
        quick: leaves out what needs torch: the trials on the GPUs.
    """
    reading = nvml.read()
    disk = None if model is None else read_disk(model)
    machine = read_host(host, port)
    findings = [
        *check_gpus(reading),
        *check_engine(reading.gpus, cpu_engine=engine_is_cpu_build()),
        *check_board(reading, read_cards(), read_kernel_log(), machine),
    ]
    if reading.gpus and not quick:
        findings += check_p2p(run_trial(P2P), reading.gpus)
        if len(reading.gpus) > 1:
            findings += check_all_reduce(run_trial(ALL_REDUCE))
    findings += check_host(machine, len(reading.gpus), 0 if disk is None else disk.model_bytes)
    if disk is not None:
        findings += check_disk(disk, start_timeout)
    elif model is not None:
        remedy = "Name a model directory with --model"
        findings.append(Finding("error", "disk", str(model), "*.safetensors files", "none", remedy))
    return tuple(findings)


def as_text(findings: Sequence[Finding]) -> str:
    """A line each, the verdict last."""
    lines = [f"{_MARKS[finding.level]:<7}  {finding}" for finding in findings]
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    return "\n".join([*lines, f"{errors} errors, {warnings} warnings"])
