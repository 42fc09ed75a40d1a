"""The catalogue of known checkpoints, configs/catalogue.yaml, as typed values; and a shape as what planning reads."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quant import architectures
from quant.errors import QuantError
from quant.formats.detect import is_ours, read_scheme
from quant.formats.others import meets
from quant.safetensors_header import Entry
from server.config.typed_yaml import read_yaml
from server.plan.model import Model, describe

FILE = Path(__file__).parents[2] / "configs" / "catalogue.yaml"
UNKNOWN = "unknown"
_GROUP = 16  # weights per block scale


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Checkpoint(_Strict):
    """One checkpoint. What is not known is `unknown`, or absent."""

    name: str
    revision: str = UNKNOWN
    architecture: str = ""
    quantization: str = ""
    refused: str = ""
    shape: str = ""
    size_gb: float | None = None
    fits: str = UNKNOWN
    licence: str = UNKNOWN
    quality: str = UNKNOWN
    notes: str = ""
    exact_name: bool = True
    source: str = Field(min_length=1)


class Quantization(_Strict):
    """How weights are stored: in words, and as the quantization_config that says so."""

    what: str = Field(min_length=1)
    config: Mapping[str, Any]


class Shape(_Strict):
    """A model's sizes, from which its plan is made."""

    config: Mapping[str, Any]
    prefix: str
    outside: Mapping[str, tuple[int, int]]
    each: Mapping[str, tuple[int, int]]
    full: Mapping[str, tuple[int, int]] = {}
    linear: Mapping[str, tuple[int, int]] = {}
    experts: Mapping[str, tuple[int, int]] = {}

    def model(self) -> Model:
        """The model, text only."""
        bare = describe(self.config, {}, str(FILE))
        return describe(self.config, dict(self._entries(bare)), str(FILE))

    def _entries(self, bare: Model) -> Iterator[tuple[str, Entry]]:
        for name, size in self.outside.items():
            yield from _tensors(name, size)
        number = bare.experts.count if bare.experts else 0
        for layer, kind in enumerate(bare.kinds):
            own = {"full": self.full, "linear": self.linear}.get(kind, {})
            for name, size in (*self.each.items(), *own.items()):
                yield from _tensors(f"{self.prefix}.layers.{layer}.{name}", size)
            for name, size in self.experts.items():
                for expert in range(number):
                    yield from _tensors(f"{self.prefix}.layers.{layer}.{name.format(expert)}", size)


class Catalogue(_Strict):
    """The file."""

    schema_version: Literal[1] = Field(alias="schema")
    checkpoints: tuple[Checkpoint, ...]
    quantizations: Mapping[str, Quantization]
    shapes: Mapping[str, Shape]

    def refusal(self, checkpoint: Checkpoint) -> str:
        """Why it cannot be served, as far as known without its weights; "" where nothing speaks against it."""
        reasons = [checkpoint.refused]
        if checkpoint.architecture and architectures.judge([checkpoint.architecture]) is not None:
            reasons.append(f"the engine does not know {checkpoint.architecture}")
        if checkpoint.quantization:
            quantization = self.quantizations[checkpoint.quantization]
            if not _is_computed(quantization.config):
                reasons.append(quantization.what)
        return "; ".join(filter(None, reasons))


def load_catalogue(path: Path = FILE) -> Catalogue:
    """The catalogue. Raises ConfigError for a malformed file."""
    return read_yaml(Catalogue, path, "catalogue")


def _tensors(name: str, size: tuple[int, int]) -> Iterator[tuple[str, Entry]]:
    rows, columns = size
    if name.endswith(".weight"):
        yield name, Entry("BF16", size, 0, 2 * rows * columns)
        return
    yield f"{name}.weight_packed", Entry("U8", (rows, columns // 2), 0, rows * columns // 2)
    yield f"{name}.weight_scale", Entry("F8_E4M3", (rows, columns // _GROUP), 0, rows * columns // _GROUP)


def _is_computed(quantization: Mapping[str, Any]) -> bool:
    """Whether the engine computes with such weights, as verify judges it."""
    if not is_ours(quantization) and meets(quantization, None) is not None:
        return False
    try:
        read_scheme(quantization, "quantization_config")
    except QuantError:
        return False
    return True
