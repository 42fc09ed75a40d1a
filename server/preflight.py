"""What can be known to fail before anything starts: the model directory, the GPUs, the port."""

import importlib.util
import json
import socket
from pathlib import Path

from quant.errors import QuantError
from quant.formats.detect import CONFIG, is_nvfp4, quantization_config
from quant.formats.others import on_volta
from quant.jsonfile import read_object
from server.config import Config
from server.decisions import Decision
from server.errors import PreflightError
from server.plan import NotPlannedError, plan_for
from server.plan.model import read_entries
from server.shards import check_shards

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
INDEX = "model.safetensors.index.json"


def check(config: Config) -> tuple[Decision, ...]:
    """Checks the model directory, the number of GPUs, and that the model fits them; returns what was decided.

    Raises:
        PreflightError: serving cannot work; says what was found and what to do.
    """
    check_model(Path(config.model))
    check_shards(Path(config.model))
    check_speculation(config)
    check_gpus(config)
    check_ray(config)
    checked = (check_quantization(config), check_memory(config))
    return tuple(decision for decision in checked if decision is not None)


def check_model(model: Path) -> None:
    """Checks that a model directory has a readable configuration and every shard its index names.

    Raises:
        PreflightError: names the file, and what to do.
    """
    if not model.is_dir():
        kind = "is not a directory" if model.exists() else "does not exist"
        raise PreflightError(
            f"model directory {model} {kind}. Models are local directories; nothing is fetched while serving. "
            "`voltserve model fetch NAME DIR` and `voltserve quantize SRC DST` make one"
        )
    config = _read_json(model / "config.json")
    if not isinstance(config, dict):
        raise PreflightError(f"{model / 'config.json'}: expected a JSON object, got {type(config).__name__}")
    if not any(path.stat().st_size for pattern in WEIGHT_PATTERNS for path in model.glob(pattern)):
        raise PreflightError(
            f"{model} has no weights: expected files {', '.join(WEIGHT_PATTERNS)}. Is the download complete?"
        )
    if (model / INDEX).exists():
        _check_index(model)


def _check_index(model: Path) -> None:
    index = _read_json(model / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise PreflightError(f"{model / INDEX}: expected an object weight_map from tensor to file name")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (model / name).is_file() or not (model / name).stat().st_size]
    if missing:
        raise PreflightError(
            f"{model}: {len(missing)} of {len(names)} shards are missing or empty: {', '.join(missing)}. "
            "Download them again"
        )


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PreflightError(f"{path} is missing: {path.parent} is not a model directory, or is incomplete") from error
    except (OSError, ValueError) as error:
        raise PreflightError(f"{path} cannot be read as JSON: {error}") from error


def check_speculation(config: Config) -> None:
    """Checks that drafting has the layers it drafts with, and that the model's layers can take back rejected tokens.

    Raises:
        PreflightError: --speculative-config asks for what this model cannot do.
    """
    speculation = config.engine.get("speculative-config")
    if not isinstance(speculation, dict):
        return
    path = Path(config.model) / "config.json"
    declared = _read_json(path)
    text = declared.get("text_config", declared) if isinstance(declared, dict) else {}
    try:
        names = read_entries(Path(config.model))
    except QuantError as error:
        raise PreflightError(str(error)) from error
    if "mtp" in str(speculation.get("method", "")) and not any(name.startswith("mtp.") for name in names):
        layers = text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0
        raise PreflightError(
            f"--speculative-config asks for MTP: expected mtp.* tensors, as {path} declares {layers} MTP layers, got "
            f"none in the {len(names)} tensors of {config.model}. Leave out --speculative-config, or serve a "
            "checkpoint that ships them"
        )
    if "linear_num_value_heads" in text:
        raise PreflightError(
            f"--speculative-config: {path} has Gated DeltaNet layers, whose kernels keep one state a sequence and "
            "cannot take back the tokens that are rejected. Leave it out"
        )


def check_gpus(config: Config) -> None:
    """Checks that there are as many GPUs as the configuration's parallelism needs.

    Raises:
        PreflightError: too few; says how many were found.
    """
    found = len(config.devices.gpus)
    if found < config.gpus_needed:
        raise PreflightError(
            f"preset {config.preset} needs {config.gpus_needed} GPUs and {found} were found: {config.devices}. "
            "Pick another preset with --preset, or lower --tensor-parallel-size"
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


def check_quantization(config: Config) -> Decision | None:
    """Checks that V100s have kernels for a model that is quantized otherwise than NVFP4; says which.

    Raises:
        PreflightError: they have none; says what demands which compute capability, and what to choose.
    """
    if not config.gpus_needed or all(gpu.capability != "7.0" for gpu in config.devices.gpus):
        return None
    path = Path(config.model) / CONFIG
    try:
        data = quantization_config(read_object(path, "Restore the file from the model's source"), path)
    except QuantError as error:
        raise PreflightError(str(error)) from error
    asked = config.engine.get("quantization")
    if data is not None and is_nvfp4(data):
        return None
    met = on_volta(data, str(asked) if asked else None)
    if met is None:
        return None
    name, other = met
    if not other.volta:
        source = "--quantization" if asked else str(path)
        raise PreflightError(f"{source}: {name} ({other.what}) does not run on a V100: {other.why}. {other.remedy}")
    return Decision("quantization", name, f"{other.what}; {other.volta}")


def check_memory(config: Config) -> Decision | None:
    """Checks that the memory plan fits the GPUs; returns what came of it. Without GPUs nothing is planned.

    Raises:
        PreflightError: it does not fit (--memory-plan warn only returns that), or the model's files are broken.
    """
    if not config.gpus_needed:
        return None
    try:
        plan = plan_for(config).plan
    except NotPlannedError as error:
        return Decision("memory plan", "none", str(error))
    except QuantError as error:
        raise PreflightError(str(error)) from error
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
    """A bound socket, not yet listening, so that a taken port is known before the engine starts.

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
