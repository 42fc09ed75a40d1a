"""How fast one stream decodes on V100s: a range, scaled from the steps that perfmodel computed (configs/speeds.yaml).

    step = products · (bytes of 4- and 8-bit linears / the table's) + lm_head · (bytes of the head / the table's)
         + (attention + delta rule + small kernels + all-reduces) · (layers / the table's) + gathering + host

Each byte is a card's share. On one card nothing is reduced or gathered. The upper end is this step in CUDA graphs. The
lower is the slower of an eager step on an old host and of the slowest peer's claim. 8-bit linears count by their bytes:
no step with them was computed. Nothing of it was run on a V100.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from server.plan.model import Model
from server.plan.weights import HEAD, VOCABULARY_PADDING, Split, sharded

FILE = Path(__file__).parents[2] / "configs" / "speeds.yaml"
Link = Literal["pcie", "sxm2"]
_PER_LAYER = ("attention", "delta_rule", "small_kernels")
_CARDS = (1, 2)  # of which there are tables


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Table(_Strict):
    """A computed step: milliseconds of each part by link, and the sizes that they are of."""

    result: str
    layers: int
    linear_bytes: int
    head_bytes: int
    pcie: Mapping[str, float]
    sxm2: Mapping[str, float]


class _Eager(_Strict):
    tokens_s: float
    layers: int


class _Peer(_Strict):
    tokens_s: float
    computed_tokens_s: float


class Speeds(_Strict):
    """The file."""

    schema_version: Literal[1] = Field(alias="schema")
    tables: Mapping[Literal["dense", "hybrid"], Table]
    eager_older_host: _Eager
    slowest_peer: _Peer


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one stream, lowest and highest; or, where there are none, why not."""

    low: float = 0.0
    high: float = 0.0
    source: str = ""
    unknown: str = ""

    def __str__(self) -> str:
        return f"speed unknown ({self.unknown})" if self.unknown else f"{self.low:.0f}–{self.high:.0f} tok/s"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        if self.unknown:
            return {"unknown": self.unknown}
        return {
            "low_tokens_s": round(self.low, 1),
            "high_tokens_s": round(self.high, 1),
            **_PROVENANCE,
            "source": self.source,
        }

    def as_text(self) -> str:
        """A line for people."""
        if self.unknown:
            return f"speed: not computed: {self.unknown}"
        return (
            f"speed: {self} at one stream and a short context, computed and never run on a V100 (from {self.source}); "
            "high: CUDA graphs, low: eager on an old host, or a peer's slowest claim"
        )


_PROVENANCE = {"provenance": "computed", "streams": 1}


@lru_cache(maxsize=1)
def speeds() -> Speeds:
    """The file's content."""
    return Speeds.model_validate(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def estimate(model: Model, split: Split, link: Link) -> Speed:
    """The speed of a model on V100s, text only."""
    if reason := _not_computed(model, split):
        return Speed(unknown=reason)
    data = speeds()
    table = data.tables["hybrid" if "linear" in model.kinds else "dense"]
    parts = table.pcie if link == "pcie" else table.sxm2
    layers = len(model.kinds) / table.layers
    milliseconds = (
        parts["products"] * linear_bytes(model, split) / table.linear_bytes
        + parts["lm_head"] * head_bytes(model, split) / table.head_bytes
        + layers * sum(parts.get(part, 0.0) for part in _PER_LAYER)
        + parts["host"]
    )
    if split.tensor > 1:
        milliseconds += layers * parts["all_reduce"] + parts["gather_logits"]
    high = 1e3 / milliseconds
    eager = data.eager_older_host
    peer = data.slowest_peer
    low = min(eager.tokens_s * eager.layers / len(model.kinds), high * peer.tokens_s / peer.computed_tokens_s)
    return Speed(low, high, table.result)


def _not_computed(model: Model, split: Split) -> str:
    if not model.linears:
        return "its weights are neither NVFP4 nor FP8"
    if model.experts is not None:
        return "there is no table for mixtures of experts"
    if split.pipeline > 1 or split.tensor not in _CARDS:
        return f"there are tables for one and two cards, not for {split}"
    if "sliding" in model.kinds:
        return "there is no table for sliding windows"
    return ""


def linear_bytes(model: Model, split: Split) -> int:
    """Bytes of 4- and 8-bit weights that one card reads in a step, without row factors and head."""
    total = 0
    for linear in model.linears:
        if linear.name.rpartition(".")[2] == HEAD:
            continue
        rows, columns = sharded(linear.name, linear.rows, linear.columns, model, split.tensor)
        total += linear.kind.packed_bytes(rows, columns) - 4 * rows
    return total


def head_bytes(model: Model, split: Split) -> int:
    """Bytes of the head that one card reads in a step."""
    for linear in model.linears:
        if linear.name.rpartition(".")[2] == HEAD:
            rows, columns = sharded(linear.name, linear.rows, linear.columns, model, split.tensor)
            return linear.kind.packed_bytes(rows, columns)
    padded = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return 2 * padded * model.hidden // split.tensor
