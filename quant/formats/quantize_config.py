"""`quantize_config.json`: how quasarnvfp4 weights were made. The file is beside config.json. Torch-free.

{"quantization_format": "quasarnvfp4", "version": 1, "block_size": 16, "scale_policy": "mse"}

`block_size` is the number of weights that share a block scale. `scale_policy` says how the scales were chosen. Reading
does not depend on it, so any name is accepted.

Optional keys allow the model to be made again. `source` names the 16-bit model, `voltserve_version` the program.
`calibration_sha256` is the digest of the calibration text, which nothing should be measured on. `calibration_windows`
pieces of `calibration_window_tokens` tokens were drawn from it with `calibration_seed`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from quant.constants import GROUP_SIZES
from quant.errors import QuantError
from quant.formats import compressed_tensors
from quant.formats.format import Format, Written
from quant.formats.scheme import Scheme
from quant.jsonfile import field, optional, read_object, refuse_unknown, write_object

FILE_NAME = "quantize_config.json"
NAME = "quasarnvfp4"
VERSION = 1
# The policies our own quantizer knows (quant/methods/scales.py).
ScalePolicy = Literal["maxabs", "mse", "fourosix", "quasar"]
SCALE_POLICIES: tuple[ScalePolicy, ...] = get_args(ScalePolicy)

_OPTIONAL: dict[str, type[str] | type[int]] = {
    "calibration_sha256": str,
    "calibration_windows": int,
    "calibration_window_tokens": int,
    "calibration_seed": int,
    "source": str,
    "voltserve_version": str,
}
_KEYS = ("quantization_format", "version", "block_size", "scale_policy", *_OPTIONAL)
_REMEDY = "Restore the file from the model's source, or make the model again with `voltserve quantize`"


@dataclass(frozen=True)
class QuantizeConfig:
    """The file's contents."""

    block_size: int
    scale_policy: str
    calibration_sha256: str | None = None
    calibration_windows: int | None = None
    calibration_window_tokens: int | None = None
    calibration_seed: int | None = None
    source: str | None = None
    voltserve_version: str | None = None


def read(directory: Path) -> QuantizeConfig:
    """Reads `directory`/quantize_config.json. Raises QuantError naming the file, key, expected and got."""
    path = directory / FILE_NAME
    data = read_object(path, _REMEDY)
    refuse_unknown(data, _KEYS, str(path), _REMEDY)
    name = field(data, "quantization_format", str, str(path), _REMEDY)
    version = field(data, "version", int, str(path), _REMEDY)
    config = QuantizeConfig(
        field(data, "block_size", int, str(path), _REMEDY),
        field(data, "scale_policy", str, str(path), _REMEDY),
        **{key: optional(data, key, kind, str(path), _REMEDY) for key, kind in _OPTIONAL.items()},  # type: ignore[arg-type]
    )
    if name != NAME:
        raise QuantError(f"{path}: quantization_format: expected {NAME!r}, got {name!r}", _REMEDY)
    if version != VERSION:
        raise QuantError(
            f"{path}: version: expected {VERSION}, got {version}", "Use the voltserve that wrote the model"
        )
    if config.block_size not in GROUP_SIZES:
        raise QuantError(f"{path}: block_size: expected 16 or 32, got {config.block_size}", _REMEDY)
    if not config.scale_policy:
        raise QuantError(f"{path}: scale_policy: expected a name, got ''", _REMEDY)
    return config


def write(directory: Path, config: QuantizeConfig) -> None:
    """Writes `directory`/quantize_config.json."""
    write_object(directory / FILE_NAME, as_json(config))


def as_json(config: QuantizeConfig) -> dict[str, object]:
    """The file's contents as a JSON object."""
    known = {key: value for key, value in asdict(config).items() if value is not None}
    return {"quantization_format": NAME, "version": VERSION, **known}


def read_file(path: Path, before: Scheme | None) -> Scheme:
    """What the file says of a model. Its tensors are named as config.json says (`before`), or as our quantizer does."""
    layout = before.layout if before else compressed_tensors.LAYOUT
    return Scheme(NAME, str(path), layout, read(path.parent).block_size, None)


def write_converted(scheme: Scheme, kept: tuple[str, ...]) -> Written:
    """What describes a model converted to this format: compressed-tensors' config, and this file beside it."""
    record = QuantizeConfig(scheme.group_size, f"converted from {scheme.format}")
    return Written(
        compressed_tensors.write(scheme, kept).quantization_config,
        {FILE_NAME: as_json(record)},
    )


# Never in config.json: the file stands beside another format's config, or alone.
FORMAT = Format(
    name=NAME,
    maker="voltserve",
    layout=compressed_tensors.LAYOUT,
    files=(FILE_NAME,),
    read_file=read_file,
    write=write_converted,
)
