"""The bytes of weights that one GPU holds, from the tensors of the checkpoint and how the engine splits them.

Tensor parallelism (TP) gives each rank a slice of every linear, as in Megatron-LM (arXiv 1909.08053). The slice is of
its outputs N ("column parallel") or of its inputs K ("row parallel"). Pipeline parallelism (PP) gives each stage whole
layers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quant.verify.tensor_parallel import SPLIT_INPUTS, SPLIT_OUTPUTS
from server.plan.model import Model, Plain, layer_of

# packed: codes, block scales and row factors stay as they are. dense: dequantized to the engine's dtype at load.
WeightForm = Literal["packed", "dense"]

VOCABULARY_PADDING = 64  # rows; vLLM's DEFAULT_VOCAB_PADDING_SIZE
# A linear's tensors in other formats than NVFP4's (GPTQ, AWQ, integer compressed-tensors).
PACKED_PARTS = ("qweight", "qzeros", "scales", "weight_packed", "weight_scale")
_WHOLE = 840  # divisible by every size up to 8
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
HEAD = "lm_head"


@dataclass(frozen=True)
class Split:
    """Over how many GPUs a model is spread: `tensor` ranks for each of `pipeline` stages."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        """How many GPUs one copy of the model takes."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP={self.tensor}" + (f" PP={self.pipeline}" if self.pipeline > 1 else "")


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU: quantized linears in `linears`, everything else in `plain`; `largest` is the biggest linear.

    `checkpoint`: bytes of the stage's quantized linears as loaded, before the engine transforms them.
    """

    linears: int
    plain: int
    largest: int
    checkpoint: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.linears + self.plain


def weights_per_gpu(model: Model, split: Split, form: WeightForm, dtype_bytes: int, embedding_bytes: int) -> Weights:
    """The weights of the fullest GPU: that of the pipeline stage that holds most."""
    stages = (stage_weights(model, split, stage, form, dtype_bytes, embedding_bytes) for stage in range(split.pipeline))
    return max(stages, key=lambda weights: weights.total)


def stage_layers(layers: int, split: Split, stage: int) -> range:
    """The decoder layers of a pipeline stage. As in vLLM, surplus layers go to the stages before the last."""
    each, left = divmod(layers, split.pipeline)
    sizes = [each] * split.pipeline
    for extra in range(left):
        sizes[-2 - extra] += 1
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def stage_weights(
    model: Model, split: Split, stage: int, form: WeightForm, dtype_bytes: int, embedding_bytes: int
) -> Weights:
    """The weights of one GPU of a pipeline stage."""
    layers = stage_layers(len(model.kinds), split, stage)
    sizes, stored = [], 0
    for linear in model.linears:
        layer = layer_of(linear.name)
        is_head = linear.name.rpartition(".")[2] == HEAD
        here = stage == split.pipeline - 1 if is_head else layer is None or layer in layers
        if here:
            rows, columns = sharded(linear.name, linear.rows, linear.columns, model, split.tensor)
            packed = linear.kind.packed_bytes(rows, columns)
            sizes.append(rows * columns * dtype_bytes if form == "dense" else packed)
            stored += packed
    plain = sum(
        _plain_bytes(tensor, model, split, dtype_bytes, embedding_bytes)
        for tensor in _plain_of(model, split, stage, layers)
    )
    plain += model.rotary_positions * model.rotary_dim * dtype_bytes  # the table of cosines and sines, one per GPU
    return Weights(sum(sizes), plain, max(sizes, default=0), stored)


def sharded(name: str, rows: int, columns: int, model: Model, tensor: int) -> tuple[int, int]:
    """(rows, columns) of a linear on one rank. Key and value heads are copied where there are fewer than ranks.

    Sizes that do not divide are rounded up: whether they can be split at all is `quant.verify`'s to say.
    """
    leaf = name.rpartition(".")[2]
    if leaf == HEAD:
        return -(-(-(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING) // tensor), columns
    if leaf in SPLIT_INPUTS:
        return rows, -(-columns // tensor)
    if leaf in {"k_proj", "v_proj"}:
        return -(-rows // min(tensor, model.kv_heads)), columns
    return (-(-rows // tensor) if leaf in SPLIT_OUTPUTS else rows), columns


def _plain_of(model: Model, split: Split, stage: int, layers: range) -> Iterator[Plain]:
    """A stage's tensors: its layers', the embedding on the first and the head on the last, the rest on every stage."""
    for tensor in model.plain:
        layer = layer_of(tensor.name)
        if layer is not None:
            here = layer in layers
        elif tensor.name.endswith(_EMBEDDING):
            here = stage == 0 or (model.tied and stage == split.pipeline - 1)
        elif tensor.name.endswith(_HEAD):
            here = stage == split.pipeline - 1 and not model.tied
        else:
            here = True
        if here:
            yield tensor


def _plain_bytes(tensor: Plain, model: Model, split: Split, dtype_bytes: int, embedding_bytes: int) -> int:
    module, _, part = tensor.name.rpartition(".")
    if part in PACKED_PARTS:
        # Whichever way a part lies, its bytes are shared out as the rows or columns of its linear are.
        rows, columns = sharded(module, _WHOLE, _WHOLE, model, split.tensor)
        return -(-tensor.nbytes * rows * columns // _WHOLE**2)
    if not tensor.floating:
        return tensor.nbytes
    shape = tensor.shape
    if len(shape) == 2:
        if tensor.name.endswith((_EMBEDDING, _HEAD)):
            padded = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
            stored_in_16_bits = tensor.nbytes == 2 * math.prod(shape)
            number = embedding_bytes if stored_in_16_bits else dtype_bytes
            return -(-padded // split.tensor) * shape[1] * number
        shape = sharded(tensor.name.removesuffix(".weight"), *shape, model, split.tensor)
    return math.prod(shape) * dtype_bytes
