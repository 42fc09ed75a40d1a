"""A quantization to do: source, method and calibration, checked by configs and headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quant import architectures
from quant.calibrate import CalibrationSettings
from quant.calibration_text import calibration_text
from quant.constants import DEFAULT_GROUP_SIZE, GROUP_SIZES
from quant.errors import QuantError
from quant.estimate import Estimate, estimate
from quant.formats import compressed_tensors, quantize_config, registry
from quant.methods import DEFAULT_METHOD, Method
from quant.model_config import read_model_config
from quant.safetensors_file import Checkpoint, open_checkpoint
from quant.selection import DEFAULT_IGNORE, Selection, select
from quant.verify import unserved
from quant.verify.layers import Modules


@dataclass(frozen=True)
class Task:
    """A checked quantization to do. No weight has been read."""

    checkpoint: Checkpoint
    config: dict[str, object]
    selection: Selection
    method: Method
    calibration: CalibrationSettings | None
    group_size: int
    ignore: tuple[str, ...]

    @property
    def estimate(self) -> Estimate:
        """Memory, disk and time that it takes."""
        windows = (self.calibration.windows, self.calibration.window_tokens) if self.calibration else (0, 0)
        return estimate(self.checkpoint, self.selection, self.method, self.group_size, *windows)


def prepare(
    src: Path,
    *,
    method: Method = DEFAULT_METHOD,
    calibration: CalibrationSettings | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
) -> Task:
    """Checks the arguments of `quantize_checkpoint`, by configs and headers alone. Raises QuantError as that does."""
    if method.policy not in quantize_config.SCALE_POLICIES:
        known = ", ".join(quantize_config.SCALE_POLICIES)
        raise QuantError(f"scale policy: expected one of {known}, got {method.policy!r}", "Choose one of these")
    if group_size not in GROUP_SIZES:
        raise QuantError(f"block size: expected 16 or 32, got {group_size}", "Choose one of these")
    config = _read_source_config(src)
    checkpoint = open_checkpoint(src)
    _refuse_quantized_tensors(checkpoint)
    selection = select(checkpoint.tensors, group_size, ignore)
    if not selection.linears:
        raise QuantError(
            f"{src}: expected linear layers to quantize, got none", "Check the ignore patterns and the source"
        )
    _refuse_unserved(src, config, checkpoint, selection, group_size)
    if method.calibrates and calibration is None:
        calibration = CalibrationSettings(calibration_text())
    if calibration is not None and not method.calibrates:
        raise QuantError(
            f"calibration: expected none for {method.name}, which runs no model, got {calibration.text.source}",
            "Leave the calibration options out, or choose quasar or compensation",
        )
    return Task(checkpoint, config, selection, method, calibration, group_size, ignore)


def _read_source_config(src: Path) -> dict[str, object]:
    if not src.is_dir():
        raise QuantError(f"{src} is not a directory", "Name a model directory")
    config = read_model_config(src)
    for present, where in (
        ("quantization_config" in config, "config.json has a quantization_config"),
        *(((src / name).exists(), f"{name} exists") for _, name in registry.own_files()),
    ):
        if present:
            raise QuantError(f"{src} is quantized already ({where})", "Start from the 16-bit model")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) == "float32":
            config[key] = "float16"
    return config


def _refuse_quantized_tensors(checkpoint: Checkpoint) -> None:
    packed = (".qweight", *(f".{layout.codes}" for layout in registry.layouts() if layout.codes != "weight"))
    for name, info in checkpoint.tensors.items():
        if info.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or name.endswith(packed):
            where = checkpoint.directory / info.shard
            raise QuantError(
                f"{where}: {name}: expected 16-bit or 32-bit floats, got quantized {info.dtype}",
                "Start from the 16-bit model",
            )


def _refuse_unserved(
    src: Path, config: Mapping[str, object], checkpoint: Checkpoint, selection: Selection, group_size: int
) -> None:
    """Refuses a result that no engine here serves, before hours of work. `verify` would refuse it afterwards."""
    shapes = {module: checkpoint.tensors[f"{module}.weight"].shape for module in selection.linears}
    linears = {
        module: (rows, columns, group_size, compressed_tensors.LAYOUT) for module, (rows, columns) in shapes.items()
    }
    findings = [
        *unserved.check_layers(Modules(nvfp4=linears), config),
        *unserved.check_experts(config, Modules(nvfp4=linears)),
    ]
    if findings:
        first = findings[0]
        raise QuantError(
            f"{src}: {first.tensor}: expected {first.expected} in the model to make, got {first.got}",
            "Add it to --ignore, or leave --ignore-only out: the default list keeps such layers in 16 bits",
        )
    if (unknown := architectures.judge(config.get("architectures"))) is not None:
        raise QuantError(
            f"{src / 'config.json'}: architectures: expected {unknown.expected}, got {unknown.got}", unknown.remedy
        )
