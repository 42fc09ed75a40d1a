"""Renders the engine's command line and environment from the configuration. No other module does."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from server.config.caches import cache_variables
from server.config.devices import V100
from server.config.flags import engine_flags, render
from server.config.settings import Config
from server.decisions import Decision
from server.environment import FORCE_VOLTA, PROGRESS_SOCKET

ENGINE_MODULE = "engine"

# Variables that the engine inherits from our environment: an allowlist, so that no key or token reaches it.
INHERITED = (
    *("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME", "PYTHONPATH", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*", "NCCL_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*"),
    *("OMP_*", "KMP_*", "MKL_*", "HF_HOME", "VLLM_*"),
)
# Also where Ray starts the workers: Ray's address and settings, and the network interface of the process group.
INHERITED_OVER_RAY = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_CGRAPH_*", "GLOO_*")
NOT_INHERITED = ("VLLM_API_KEY", "*TOKEN*", "*SECRET*", "*PASSWORD*")

# On every machine: nothing is fetched, nothing is reported, and the engine listens on this machine only. Output is not
# buffered. Only the gateway closes an idle connection to the engine (the value is a year in seconds).
ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "31536000",
}
DEFAULTS = {"VLLM_HOST_IP": "127.0.0.1"}
# Instead, where Ray starts the workers: no loopback address, and the variables that workers need besides vLLM's own.
# Nor a folder of caches, since another machine's user may have another home.
DEFAULTS_OVER_RAY = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": f"{PROGRESS_SOCKET},{FORCE_VOLTA}"}
# vLLM has torch compile small functions (sampling, log probabilities, masks) at their first use, even where it compiles
# nothing else. That adds seconds to a request. It needs a C++ compiler, and the engine dies without one.
OFF_VARIABLE = "TORCH_COMPILE_DISABLE"


@dataclass(frozen=True)
class Launch:
    """How the engine is started: `argv`, and its whole `env`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def render_launch(
    config: Config, runtime: Path, environ: Mapping[str, str] | None = None, module: str = ENGINE_MODULE
) -> Launch:
    """The engine's start from the configuration.

    Args:
        config: the merged configuration.
        runtime: the private folder of the engine's sockets.
        environ: our own environment; the process's by default.
        module: the Python module that is the engine.
    """
    environ = os.environ if environ is None else environ
    argv = [sys.executable, "-m", module, "--model", config.model, "--uds", str(engine_socket(runtime))]
    argv += ["--served-model-name", *config.served_model_name]
    flags = engine_flags()
    for name, value in sorted(config.engine.items()):
        argv += render(flags[name], value)
    patterns = (*INHERITED, *INHERITED_OVER_RAY) if config.over_ray else INHERITED
    inherited = {name: value for name, value in environ.items() if is_inherited(name, patterns)}
    env = {
        **(DEFAULTS_OVER_RAY if config.over_ray else {**DEFAULTS, **cache_variables(environ)}),
        **({} if _compiles_or_records(config) else {OFF_VARIABLE: "1"}),
        **config.env,
        **inherited,
        **ALWAYS,
        "VLLM_RPC_BASE_PATH": str(runtime),  # vLLM's own sockets, which it leaves behind
        PROGRESS_SOCKET: str(progress_socket(runtime)),
    }
    if config.volta == "force":
        env[FORCE_VOLTA] = "1"
    env |= _visible_cards(config)
    return Launch(tuple(argv), env)


def _visible_cards(config: Config) -> dict[str, str]:
    """The cards to use, by UUID and in NVML's order. Ray assigns its workers' cards itself."""
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if config.gpus_needed else {}
    cards = config.devices.gpus if config.pinned else config.devices.gpus[: config.gpus_needed]
    if not cards or (config.over_ray and not config.pinned):
        return order
    return {**order, "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in cards)}


def _compiles_or_records(config: Config) -> bool:
    """Whether the engine compiles the model or records its steps, without a compiler (engine/steps/recording.py).

    V100s record, eagerly and for graphs; on other GPUs the model is compiled only if asked for (engine/platform.py).
    CPUs do either unless in eager mode.
    """
    eager = bool(config.engine.get("enforce-eager"))
    if not config.gpus_needed:
        return not eager
    if config.volta == "force" or all(gpu.capability == V100 for gpu in config.devices.gpus):
        return True
    return not eager and bool({"compilation-config", "optimization-level"} & config.engine.keys())


def is_inherited(name: str, patterns: Sequence[str] = INHERITED) -> bool:
    """Whether the engine inherits a variable of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns) and not any(
        fnmatchcase(name, pattern) for pattern in NOT_INHERITED
    )


def overridden(config: Config, environ: Mapping[str, str] | None = None) -> list[Decision]:
    """The preset's variables that our own environment overrides."""
    environ = os.environ if environ is None else environ
    return [
        Decision(name, environ[name], f"set in the environment; preset {config.preset} has {value}")
        for name, value in config.env.items()
        if is_inherited(name) and environ.get(name, value) != value
    ]


def engine_socket(runtime: Path) -> Path:
    """Where the engine serves HTTP."""
    return runtime / "engine.sock"


def progress_socket(runtime: Path) -> Path:
    """Where the engine's progress datagrams are received."""
    return runtime / "progress.sock"
