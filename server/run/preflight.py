"""Checks that find failures before anything starts: the model directory, the GPUs, the port."""

import importlib.util
import socket
from pathlib import Path

from quant.constants import CONFIG
from quant.errors import QuantError
from quant.verify.servable import Examination
from server.config import settings
from server.config.devices import V100
from server.config.settings import Config
from server.decisions import Decision
from server.errors import ModelRefusedError, PreflightError
from server.plan import NotPlannedError, plan_for
from server.run import servable


def check(config: Config) -> tuple[Decision, ...]:
    """Checks that the model can be served here, that there are enough GPUs, and that it fits them. Returns the
    decisions.

    Raises:
        PreflightError: serving cannot work; says what was found and what to do.
    """
    seen = servable.check(config)
    check_speculation(config, seen)
    check_gpus(config)
    check_ray(config)
    planned = check_memory(config)
    return () if planned is None else (planned,)


def check_speculation(config: Config, seen: Examination) -> None:
    """Checks that the model has draft layers, and that its layers can undo rejected tokens.

    Raises:
        PreflightError: --speculative-config asks for what this model cannot do.
    """
    speculation = config.engine.get("speculative-config")
    if not isinstance(speculation, dict):
        return
    path = Path(config.model) / CONFIG
    inner = seen.config.get("text_config")
    text = inner if isinstance(inner, dict) else seen.config
    if "mtp" in str(speculation.get("method", "")) and not any(name.startswith("mtp.") for name in seen.tensors):
        layers = text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0
        raise PreflightError(
            f"--speculative-config asks for MTP: expected mtp.* tensors, as {path} declares {layers} MTP layers, got "
            f"none in the {len(seen.tensors)} tensors of {config.model}. Leave out --speculative-config, or serve a "
            "checkpoint that ships them"
        )
    if "linear_num_value_heads" in text:
        raise PreflightError(
            f"--speculative-config: {path} has Gated DeltaNet layers, whose kernels keep one state a sequence and "
            "cannot take back the tokens that are rejected. Leave it out"
        )


def check_gpus(config: Config) -> None:
    """Checks that there are as many GPUs as the configuration's parallelism needs, and that they and the engine
    suit each other.

    Raises:
        PreflightError: too few, cards of another kind, or an engine for CPUs; says what was found.
    """
    found = len(config.devices.gpus)
    if found < config.gpus_needed:
        raise PreflightError(
            f"preset {config.preset} needs {config.gpus_needed} GPUs and {found} were found: {config.devices}. "
            "Pick another preset with --preset, or lower --tensor-parallel-size"
        )
    others = [gpu for gpu in config.devices.gpus[: config.gpus_needed] if gpu.capability != V100]
    if others and config.volta != "force":
        raise PreflightError(
            f"preset {config.preset} is for V100s: expected GPUs of compute capability {V100}, got "
            f"{' + '.join(map(str, others))}. Our kernels are for those; --volta force treats every card as one, for "
            "trials"
        )
    if config.gpus_needed and settings.engine_is_cpu_build():
        raise PreflightError(
            f"preset {config.preset} is for GPUs, and the installed engine is the CPU build. `make setup ENGINE=gpu` "
            "installs the GPU engine; --preset cpu-smoke serves on the CPU"
        )


def check_ray(config: Config) -> None:
    """Checks that Ray is there where it is to start the engine's workers.

    Raises:
        PreflightError: it is absent.
    """
    if not config.over_ray:
        return
    if importlib.util.find_spec("ray") is None:
        raise PreflightError(
            "--distributed-executor-backend ray: Ray is absent from this Python. `make setup-ray` installs it, and the "
            "-ray images have it; docs/cluster.md says how machines are put together"
        )


def check_memory(config: Config) -> Decision | None:
    """Checks that the memory plan fits the GPUs; returns the decision. Without GPUs nothing is planned.

    Raises:
        PreflightError: it does not fit; --memory-plan warn only returns that.
        ModelRefusedError: the model's files are broken.
    """
    if not config.gpus_needed:
        return None
    try:
        plan = plan_for(config).plan
    except NotPlannedError as error:
        return Decision("memory plan", "none", str(error))
    except QuantError as error:
        raise ModelRefusedError(str(error)) from error
    if plan.fits:
        reason = f"{plan.together} sequences of {plan.length:,} tokens at once; `voltserve plan` shows the sum"
        return Decision("memory plan", f"{plan.tokens:,} tokens of cache", reason)
    problems = "; ".join(plan.problems)
    if config.memory_plan == "warn":
        return Decision("memory plan", "started although it does not fit", f"--memory-plan warn; {problems}")
    raise PreflightError(
        f"{config.model} does not fit with {plan.split}: {problems}. `voltserve plan` shows the sum, and --memory-plan "
        "warn starts all the same"
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. So a used port fails before the engine starts.

    Raises:
        PreflightError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PreflightError(f"cannot listen on {host}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise PreflightError(
            f"cannot listen on {host} port {port}: {error.strerror}. Stop what uses it, or choose another with --port"
        ) from error
    return sock
