"""What a model directory holds, for people: sizes by kind, layers, format, and how it can be split. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from quant.model_config import read_model_config
from quant.verify.experts import read_experts
from quant.verify.files import Tensor
from quant.verify.layers import Modules
from quant.verify.report import Report, verify
from quant.verify.tensor_parallel import SIZES

# Kinds of 16-bit tensors, by a part of their name. The first match counts.
_KINDS = (
    ("vision and audio", ("visual", "vision", "audio")),
    ("MTP", ("mtp",)),
    ("embedding", ("embed",)),
    ("head", ("lm_head",)),
    ("norms and biases", ("norm", ".bias")),
)


@dataclass(frozen=True)
class Summary:
    """What `inspect` shows. Bytes are of tensor data; `bytes_by_kind` and `shapes` are in order of size."""

    directory: str
    architecture: str
    format: str
    group_size: int | None
    activations: str
    layers: int
    experts: str  # how many, how many per token, how wide; empty without experts
    parameters: int
    bytes: int
    shards: int
    bytes_by_kind: Mapping[str, int]
    linears: int  # in NVFP4
    fp8_linears: int
    shapes: Mapping[str, int]  # "down_proj [N, K]" to the number of such linears
    kept_modules: tuple[str, ...]  # leaf names of 16-bit 2-D weights
    tensor_parallel: Mapping[int, str]  # "works", or the first obstacle
    problems: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def inspect_model(directory: Path) -> Summary:
    """Reads headers only. Raises QuantError for a directory without a readable config.json."""
    report = verify(directory, "headers")
    config = read_model_config(directory)
    modules = report.modules
    sizes: Counter[str] = Counter()
    for name, tensor in report.tensors.items():
        sizes[_kind(name, modules)] += tensor.entry.end - tensor.entry.start
    shapes = Counter(
        f"{module.rpartition('.')[2]} [{rows}, {columns}]" + ("" if kind.element == "E2M1" else f" {kind}")
        for module, (rows, columns, kind) in modules.quantized.items()
    )
    kept = Counter(module.rpartition(".")[2] for module, shape in modules.plain.items() if len(shape) == 2)
    architectures = config.get("architectures")
    return Summary(
        directory=str(directory),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        format=report.scheme.format if report.scheme else "16-bit or unknown",
        group_size=report.scheme.group_size if report.scheme and modules.nvfp4 else None,
        activations=_activations(report),
        layers=_layers(report.tensors),
        experts=str(read_experts(text if isinstance(text := config.get("text_config"), dict) else config) or ""),
        parameters=_parameters(modules, report.tensors),
        bytes=sum(sizes.values()),
        shards=len({tensor.shard for tensor in report.tensors.values()}),
        bytes_by_kind=dict(sizes.most_common()),
        linears=len(modules.nvfp4),
        fp8_linears=len(modules.fp8),
        shapes=dict(shapes.most_common()),
        kept_modules=tuple(sorted(kept)),
        tensor_parallel={size: _first_obstacle(report, size) for size in SIZES},
        problems=sum(finding.severity == "error" for finding in report.findings),
    )


def _activations(report: Report) -> str:
    scheme = report.scheme
    made_for = [what for what, asked in (("W4A4", scheme.w4a4), ("W8A8", scheme.w8a8)) if asked] if scheme else []
    return f"quantized too ({' and '.join(made_for)})" if made_for else "16 bits"


def _kind(name: str, modules: Modules) -> str:
    module = name.rpartition(".")[0]
    if module in modules.fp8:
        return "FP8 linears"
    if module in modules.nvfp4:
        return "NVFP4 experts" if ".experts." in module else "NVFP4 linears"
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other 16-bit tensors")


def _layers(tensors: Mapping[str, Tensor]) -> int:
    numbers = {
        number
        for name in tensors
        if not any(side in name for side in ("visual", "vision", "audio", "mtp"))
        and (number := name.partition("layers.")[2].partition(".")[0]).isdecimal()
    }
    return len(numbers)


def _parameters(modules: Modules, tensors: Mapping[str, Tensor]) -> int:
    """Number of weights. NVFP4 linears hold two per byte. Scales are not counted."""
    linears = modules.quantized
    quantized = sum(rows * columns for rows, columns, _ in linears.values())
    plain = 0
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in linears:
            count = 1
            for size in tensor.entry.shape:
                count *= size
            plain += count
    return quantized + plain


def _first_obstacle(report: Report, size: int) -> str:
    return str(report.obstacles[size][0]) if report.obstacles[size] else "works"
