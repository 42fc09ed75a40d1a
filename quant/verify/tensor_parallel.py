"""The numbers of GPUs over which a model's linears can be split (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quant.constants import CONFIG
from quant.formats.weights import FP8_BLOCK, KERNEL_COLUMNS

SIZES = (1, 2, 4, 8)

# Linears whose input features (K) are split over ranks. All others are split along their outputs (N), or not at all.
SPLIT_INPUTS = ("o_proj", "down_proj", "out_proj", "w2", "dense_4h_to_h", "c_proj", "linear_fc2", "fc2", "dense")
SPLIT_OUTPUTS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "in_proj_qkvz", "q_b_proj", "kv_b_proj"),
)
# Key and value heads are replicated if there are fewer heads than ranks.
_KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Obstacle:
    """Why a size does not work: the layer (or config key), the dimension, its size, and which sizes work for it."""

    size: int
    layer: str
    dimension: str
    length: int
    reason: str
    works: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.works)) or "none"
        return f"TP={self.size}: {self.layer}: {self.dimension}={self.length} {self.reason}; sizes that work: {sizes}"


def obstacles(linears: Mapping[str, tuple[int, int, int]], config: Mapping[str, object]) -> dict[int, list[Obstacle]]:
    """The obstacles to each of SIZES, one per kind of layer and length.

    `linears`: (N, K, group size) of the quantized linears by module name; K per rank must be a multiple of the last.
    `config`: config.json, for its head counts (its text_config's if it has one).
    """
    found: dict[int, list[Obstacle]] = {size: [] for size in SIZES}
    seen: set[tuple[str, int]] = set()
    text = config.get("text_config")
    heads = _heads(text if isinstance(text, dict) else config)
    checks: list[tuple[str, str, int, str, tuple[int, ...]]] = []
    for name, count in heads.items():
        key_value = name == "num_key_value_heads"
        works = tuple(s for s in SIZES if count % s == 0 or (key_value and s % count == 0))
        checks.append((CONFIG, name, count, "is not divisible", works))
    for module, (rows, columns, group_size) in linears.items():
        leaf = module.rpartition(".")[2]
        # The last of a row's blocks with a scale each may be cut short, by the matrix but not by a rank.
        whole = KERNEL_COLUMNS if group_size == FP8_BLOCK else group_size
        if leaf in SPLIT_INPUTS:
            works = tuple(
                size for size in SIZES if columns % (size * group_size) == 0 or (size == 1 and columns % whole == 0)
            )
            check = (module, "K", columns, f"does not leave each rank a multiple of the group size {group_size}", works)
        else:
            splits = leaf in SPLIT_OUTPUTS
            replicated = leaf in _KEY_VALUE and "num_key_value_heads" in heads
            fits = columns % whole == 0
            works = tuple(s for s in SIZES if fits and (rows % s == 0 or replicated or not splits))
            check = (
                (module, "N", rows, "is not divisible", works)
                if fits
                else (module, "K", columns, f"is not a multiple of the group size {whole}", ())
            )
        if (leaf, check[2]) not in seen:
            seen.add((leaf, check[2]))
            checks.append(check)
    for layer, dimension, length, reason, works in checks:
        for size in SIZES:
            if size not in works:
                found[size].append(Obstacle(size, layer, dimension, length, reason, works))
    return found


def _heads(config: Mapping[str, object]) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    return {name: count for name in names if isinstance(count := config.get(name), int) and count > 0}
