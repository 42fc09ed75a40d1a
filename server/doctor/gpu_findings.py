"""Checks of driver and GPUs: pure functions of a reading of NVML."""

from collections.abc import Iterator

from server.config.devices import V100
from server.doctor.findings import Finding, Level
from server.doctor.nvml import Gpu, Pair, Reading

HOT = 85  # °C, where a V100 starts to slow down
WARM = 80
# CUDA 12.8's minor-version compatibility starts at driver 525.60; R580 is the last branch that drives Volta.
OLDEST_BRANCH, NEWEST_BRANCH = 525, 580
THERMAL = {"software thermal slowdown", "hardware thermal slowdown"}
BUSY = 512 * 2**20  # bytes in use before anything of ours runs


def check_gpus(reading: Reading) -> Iterator[Finding]:
    """All checks of NVML's reading, in order."""
    if reading.absent:
        remedy = (
            "Without it only the CPU engine works. On a GPU host install driver 535, 550, 570 or 580; start containers "
            "with --gpus all"
        )
        yield Finding("info", "driver", "driver", "an NVIDIA driver", reading.problem, remedy)
        return
    if reading.problem:
        remedy = "Does nvidia-smi work? After a driver update reboot; `dmesg | grep -i xid` names a lost card's reason"
        yield Finding("error", "driver", "driver", "a driver that answers", reading.problem, remedy)
        return
    yield _driver(reading)
    if not reading.gpus:
        remedy = "Check `lspci | grep -i nvidia` and `dmesg | grep -i nvrm`"
        yield Finding("error", "gpus", "GPUs", "at least one", "none", remedy)
    yield from _capabilities(reading.gpus)
    for gpu in reading.gpus:
        for check in (_temperature, _throttling, _power, _persistence, _ecc, _retired, _in_use):
            finding = check(gpu)
            if finding is not None:
                yield finding
    yield from (_topology(pair) for pair in reading.pairs)


def _driver(reading: Reading) -> Finding:
    got = f"{reading.driver} (CUDA {reading.cuda})"
    branch = reading.driver.partition(".")[0]
    expected = f"branch {OLDEST_BRANCH} to {NEWEST_BRANCH}"
    if not branch.isdigit() or int(branch) < OLDEST_BRANCH:
        return Finding("error", "driver", "driver", expected, got, "Install driver 535, 550, 570 or 580")
    if int(branch) > NEWEST_BRANCH:
        remedy = "Volta is dropped after R580; go back to it if the GPUs do not show"
        return Finding("warning", "driver", "driver", expected, got, remedy)
    return Finding("ok", "driver", "driver", expected, got)


def _capabilities(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    kinds = {(gpu.capability, round(gpu.memory_total / 2**30)) for gpu in gpus}
    if len(kinds) > 1:
        got = ", ".join(f"GPU {gpu.index}: {gpu.name} ({gpu.capability})" for gpu in gpus)
        remedy = "serve takes the best set of V100s of one size; CUDA_VISIBLE_DEVICES chooses others"
        yield Finding("warning", "capability", "GPUs", "GPUs of one kind", got, remedy)
    for gpu in gpus:
        got = f"{gpu.capability} ({gpu.name}, {gpu.memory_total / 2**30:.1f} GiB)"
        what, expected = f"GPU {gpu.index}", f"capability {V100}"
        if gpu.capability == V100:
            yield Finding("ok", "capability", what, expected, got)
        else:
            remedy = "The presets and kernels are made and tuned for V100s; others may not work"
            yield Finding("warning", "capability", what, expected, got, remedy)


def _temperature(gpu: Gpu) -> Finding | None:
    if gpu.temperature is None:
        return None
    hot = HOT if gpu.slowdown is None else min(HOT, gpu.slowdown - 2)
    expected = f"below {hot} °C"
    got = f"{gpu.temperature} °C"
    if gpu.slowdown is not None:
        got += f", and it slows itself down at {gpu.slowdown}"
    if gpu.temperature >= hot:
        return Finding("warning", "temperature", f"GPU {gpu.index}", expected, got, _cooling(gpu))
    near = gpu.temperature >= hot - (HOT - WARM)
    return Finding(
        "info" if near else "ok", "temperature", f"GPU {gpu.index}", expected, got, _cooling(gpu) if near else ""
    )


def _cooling(gpu: Gpu) -> str:
    lower = "`nvidia-smi -pl 200` lowers power and heat"
    if gpu.fans == 0:
        return f"The card is passive: a fan must blow through it, with a duct, at full speed under load. {lower}"
    return f"Improve the air flow; a passive V100 needs a fan of its own. {lower}"


def _throttling(gpu: Gpu) -> Finding | None:
    if not gpu.throttle:
        return None
    reasons = set(gpu.throttle)
    remedy = "It runs at its power limit: normal under load"
    if reasons & THERMAL:
        remedy = _cooling(gpu)
    elif reasons - {"power cap"}:
        remedy = "Check the power supply and its cables to the card, then cooling"
    got = ", ".join(gpu.throttle)
    level: Level = "warning" if reasons - {"power cap"} else "info"
    return Finding(level, "throttling", f"GPU {gpu.index}", "full clocks", got, remedy)


def _ecc(gpu: Gpu) -> Finding | None:
    what = f"GPU {gpu.index} memory"
    if gpu.ecc is None:
        return None
    if not gpu.ecc:
        remedy = f"Turn it on with `nvidia-smi -i {gpu.index} -e 1` and reboot: flipped bits become wrong words"
        return Finding("warning", "ecc", what, "ECC on", "off", remedy)
    since_boot, ever = gpu.ecc_errors or (0, 0)
    if since_boot:
        remedy = f"Reset the GPU (`nvidia-smi --gpu-reset -i {gpu.index}`) or reboot; replace it if they come again"
        return Finding("error", "ecc", what, "no uncorrected errors", f"{since_boot} since the driver started", remedy)
    if ever:
        return Finding("warning", "ecc", what, "no uncorrected errors", f"{ever} in its life", "Watch whether it grows")
    return Finding("ok", "ecc", what, "no uncorrected errors", "ECC on, no uncorrected errors")


def _retired(gpu: Gpu) -> Finding | None:
    if gpu.retired is None or gpu.retired == (0, False):
        return None
    pages, pending = gpu.retired
    got = f"{pages} retired for two-bit errors" + (", some only after a reboot" if pending else "")
    remedy = "Reboot, so that they are no longer used" if pending else "Replace the card before it has 60"
    return Finding("error" if pending else "warning", "ecc", f"GPU {gpu.index} pages", "none retired", got, remedy)


def _power(gpu: Gpu) -> Finding | None:
    if gpu.power is None:
        return None
    limit, default = gpu.power
    what, expected, got = f"GPU {gpu.index} power limit", f"{default:.0f} W, the default", f"{limit:.0f} W"
    if limit >= default:
        return Finding("ok", "power", what, expected, got)
    remedy = (
        f"`sudo nvidia-smi -i {gpu.index} -pl {default:.0f}` lifts it, unless it is meant; prompts are slower with it"
    )
    return Finding("info", "power", what, expected, got, remedy)


def _persistence(gpu: Gpu) -> Finding | None:
    if gpu.persistence is None:
        return None
    what = f"GPU {gpu.index} persistence mode"
    if gpu.persistence:
        return Finding("ok", "persistence", what, "on", "on")
    remedy = (
        f"`sudo nvidia-smi -i {gpu.index} -pm 1`, or enable nvidia-persistenced: the driver forgets power limit and "
        "error counters whenever no process holds the card, and starts take longer"
    )
    return Finding("warning", "persistence", what, "on", "off", remedy)


def _in_use(gpu: Gpu) -> Finding | None:
    if gpu.memory_used < BUSY + gpu.memory_total // 100:
        return None
    who = ", ".join(f"process {pid} ({size / 2**30:.1f} GiB)" for pid, size in gpu.processes) or "something"
    got = f"{gpu.memory_used / 2**30:.1f} GiB in use by {who}"
    remedy = "Stop it, or lower --gpu-memory-utilization by that share"
    return Finding("warning", "memory", f"GPU {gpu.index} memory", "an idle card", got, remedy)


def _topology(pair: Pair) -> Finding:
    what = f"GPU {pair.first} and {pair.second}"
    if pair.nvlink:
        return Finding("ok", "topology", what, "NVLink", "joined by NVLink")
    got = f"PCIe, meeting at {pair.meet}"
    if pair.peer_access is False:
        got += ", no peer access"
    remedy = "A -pcie preset fits: all-reduce goes through host memory"
    return Finding("info", "topology", what, "NVLink or PCIe", got, remedy)
