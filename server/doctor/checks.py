"""Checks of the machine, the disk, and the trials on the GPUs: pure functions of the readings."""

from collections.abc import Iterator, Sequence

from server.config.devices import V100
from server.doctor.disk import Disk
from server.doctor.findings import Finding, Level
from server.doctor.host import Host
from server.doctor.nvml import Gpu
from server.doctor.trial import Trial
from server.units import GIB

SHARED_MEMORY = 8 * GIB  # the documents' --shm-size 16g is twice what NCCL and vLLM were seen to need
OPEN_FILES = 4096
SLOW_DISK = 200e6  # bytes per second; a good hard disk
FASTEST_HARD_DISK = 320e6
_NO_PEER = "Use a -pcie preset, or set NCCL_P2P_DISABLE=1"


def check_engine(gpus: Sequence[Gpu], *, cpu_engine: bool) -> Iterator[Finding]:
    """Whether the installed engine is for this machine."""
    cards = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
    if not cpu_engine and not gpus:
        remedy = "`make setup ENGINE=cpu` installs the CPU engine; with a card, look at the driver"
        yield Finding("error", "engine", "engine", "a card for the GPU build", "no card", remedy)
    elif cpu_engine and any(gpu.capability == V100 for gpu in gpus):
        remedy = "`make setup ENGINE=gpu` installs the engine that uses them"
        yield Finding("warning", "engine", "engine", f"the GPU build for {cards}", "the CPU build", remedy)
    else:
        yield Finding("ok", "engine", "engine", "one for this machine", "CPU build" if cpu_engine else "CUDA build")


def check_host(host: Host, gpus: int, model_bytes: int) -> Iterator[Finding]:
    """Limits of the machine for an engine on `gpus` GPUs; `model_bytes` is 0 where no model is named."""
    yield _shared_memory(host, gpus)
    yield _open_files(host)
    yield _locked_memory(host, gpus)
    yield _memory(host, model_bytes)
    if host.port_problem:
        remedy = "Stop what uses it, or choose another with --port"
        yield Finding("error", "port", "port", f"{host.address} free", host.port_problem, remedy)
    else:
        yield Finding("ok", "port", "port", "free", f"{host.address} is free")
    yield from _container(host, gpus)


def _shared_memory(host: Host, gpus: int) -> Finding:
    size = host.shared_memory or 0
    got = f"{size / GIB:.2f} GiB"
    expected = f"{SHARED_MEMORY / GIB:.0f} GiB for several GPUs"
    # One engine process uses little shared memory; several exchange tensors through it.
    if size >= (SHARED_MEMORY if gpus > 1 else 64 * 2**20):
        return Finding("ok", "shm", "shared memory", expected, got)
    level: Level = "error" if gpus > 1 and size < GIB else "warning"
    return Finding(
        level, "shm", "shared memory", expected, got, "Start the container with --shm-size 16g (or --ipc host)"
    )


def _open_files(host: Host) -> Finding:
    _, hard = host.open_files
    unlimited = hard < 0
    got = "unlimited" if unlimited else str(hard)
    if unlimited or hard >= OPEN_FILES:
        return Finding("ok", "ulimit", "open files", f"{OPEN_FILES}", got)
    remedy = "Raise it (ulimit -Hn 65536, or --ulimit nofile=65536 for a container): each stream needs two"
    return Finding("warning", "ulimit", "open files", f"{OPEN_FILES}", got, remedy)


def _locked_memory(host: Host, gpus: int) -> Finding:
    limit = host.locked_memory
    got = "unlimited" if limit < 0 else f"{limit / 2**20:.0f} MiB"
    if limit < 0 or limit >= GIB or gpus < 2:
        return Finding("ok", "ulimit", "locked memory", "unlimited", got)
    remedy = "Raise it (memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a container): NCCL pins memory"
    return Finding("warning", "ulimit", "locked memory", "unlimited for several GPUs", got, remedy)


def _memory(host: Host, model_bytes: int) -> Finding:
    got = f"{host.memory_available / GIB:.1f} GiB on {host.cores} cores"
    needed = min(model_bytes, 4 * GIB) + 4 * GIB
    expected = f"{needed / GIB:.0f} GiB"
    if host.memory_available >= needed:
        return Finding("ok", "memory", "available memory", expected, got)
    remedy = "Stop other programs, or give the container more (--memory): the engine's processes and a shard must fit"
    return Finding("warning", "memory", "available memory", expected, got, remedy)


def _container(host: Host, gpus: int) -> Iterator[Finding]:
    if host.container and not host.device_nodes and not gpus:
        remedy = "Start it with --gpus all, and install the NVIDIA Container Toolkit on the host, if GPUs are meant"
        yield Finding("info", "container", "container", "/dev/nvidia0", "no GPU device", remedy)
    elif not host.container and host.docker and gpus and not host.container_toolkit:
        remedy = "Install nvidia-container-toolkit and run `nvidia-ctk runtime configure`, to give containers GPUs"
        yield Finding("warning", "container", "Docker", "the NVIDIA Container Toolkit", "none", remedy)
    elif host.container_toolkit:
        yield Finding("ok", "container", "container toolkit", "installed", "installed")


def check_disk(disk: Disk, start_timeout: float) -> Iterator[Finding]:
    """Kind and speed of the disk under a model, and whether it loads within `start_timeout` seconds."""
    kind = {None: "unknown kind", True: "hard disk", False: "SSD"}[disk.rotational]
    name = f"{disk.device}, {kind}" if disk.device else f"{kind}: a network or overlay file system"
    if disk.rotational and disk.speed > FASTEST_HARD_DISK:
        # Virtual disks report that they rotate, whatever the real disk is.
        yield Finding("ok", "disk", "model's disk", "an SSD", f"{name} by its own account, but faster than any")
    elif disk.rotational:
        remedy = "Copy the model to an SSD: it loads in a fraction of the time"
        yield Finding("warning", "disk", "model's disk", "an SSD", name, remedy)
    else:
        yield Finding("ok", "disk", "model's disk", "an SSD", name)
    how = "past the page cache" if disk.method == "direct" else "maybe from the page cache"
    got = (
        f"{disk.speed / 1e6:.0f} MB/s ({disk.read_bytes / 1e6:.0f} MB read {how}): "
        f"{disk.model_bytes / 1e9:.2f} GB load in {disk.load_seconds:.0f} s"
    )
    expected = f"loading well within --start-timeout {start_timeout:g} s"
    if disk.load_seconds > start_timeout / 2:
        yield Finding("error", "disk", "read speed", expected, got, "Move the model, or raise --start-timeout")
    elif disk.speed < SLOW_DISK:
        yield Finding("warning", "disk", "read speed", expected, got, "Put models on a local SSD")
    else:
        yield Finding("ok", "disk", "read speed", expected, got)


def check_p2p(trial: Trial, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What copying among the GPUs brought, and whether torch has code for each."""
    what = "peer-to-peer"
    if trial.problem:
        remedy = f"{_NO_PEER}. IOMMU and ACS in the BIOS break peer-to-peer: turn them off"
        yield Finding(
            "error", "p2p", what, "an answer", trial.problem, remedy if trial.timed_out else "See the message"
        )
        return
    built = set(trial.answer["architectures"])
    for gpu in gpus:
        architecture = f"sm_{gpu.capability.replace('.', '')}"
        if architecture not in built:
            got = f"torch {trial.answer['torch']} with {', '.join(sorted(built)) or 'none'}"
            remedy = "Install the locked requirements (`make setup ENGINE=gpu`), or `scripts/docker_build.sh gpu`"
            yield Finding("error", "torch", f"GPU {gpu.index}", f"machine code for {architecture}", got, remedy)
    for pair in trial.answer["pairs"]:
        what = f"GPU {pair['source']} to {pair['destination']}"
        if pair["wrong"]:
            got = f"{pair['wrong']} wrong elements"
            yield Finding("error", "p2p", what, "the bytes that were sent", got, _NO_PEER)
        else:
            path = "peer-to-peer" if pair["peer_access"] else "through host memory"
            yield Finding("ok", "p2p", what, "the bytes that were sent", f"verified {path}, {pair['gb_per_s']} GB/s")


def check_all_reduce(trial: Trial) -> Iterator[Finding]:
    """What all-reduces over all GPUs brought, through NCCL and ours."""
    what = "all-reduce"
    if trial.timed_out:
        remedy = f"{_NO_PEER}, and run doctor again with NCCL_P2P_DISABLE=1"
        yield Finding("error", "all-reduce", what, "an answer in time", trial.problem, remedy)
        return
    if trial.problem:
        remedy = "Run it with NCCL_DEBUG=INFO; the first WARN line names the cause"
        yield Finding("error", "all-reduce", what, "an answer", trial.problem, remedy)
        return
    answer, expected = trial.answer, "right sums"
    if answer["wrong"]:
        yield Finding("error", "all-reduce", what, expected, f"{answer['wrong']} wrong elements", _NO_PEER)
    else:
        got = (
            f"right over {answer['ranks']} GPUs, {answer['bytes'] / 2**20:.0f} MiB in {answer['seconds'] * 1e3:.1f} ms"
        )
        yield Finding("ok", "all-reduce", what, expected, got)
    what = "all-reduce through the host's memory"
    if answer["host_memory"]:
        remedy = "The engine takes NCCL instead, which is slower. A container needs --shm-size 16g and room in /dev/shm"
        yield Finding("warning", "all-reduce", what, expected, answer["host_memory"], remedy)
    else:
        yield Finding("ok", "all-reduce", what, expected, "right")
