"""The key/value cache of one GPU, laid out as vLLM 0.28.0 does it (vllm/v1/core/kv_cache_utils.py, read, not copied).

The cache is one pool of blocks. A block has `block_size` tokens of each of `pools` layers that lie side by side. Layers
of another kind have a sliding window or a recurrent state. They take blocks of the same size from the same pool, in
groups of `pools` layers. So a model with one kind of layer has one group. A hybrid of 16 full and 48 recurrent layers
has four groups of 16.
"""

from dataclasses import dataclass

from server.plan.model import LayerKind, Model
from server.plan.weights import Split, stage_layers

GPU_BLOCK = 16  # tokens; vLLM's default
CPU_BLOCK = 128  # tokens; vLLM's CPU platform
_ALIGNMENT = 16  # tokens; hybrid models' blocks are a multiple of it


@dataclass(frozen=True)
class Groups:
    """How many groups of layers there are of each kind."""

    full: int
    sliding: int
    linear: int


@dataclass(frozen=True)
class Cache:
    """The layout on one GPU.

    `token_bytes`: one token of one attention layer. `page_bytes`: one block of one layer. `state_bytes`: the state of
    one sequence in one recurrent layer, whatever its length; it takes a whole page. `states`: pages that a sequence
    holds in each recurrent layer.
    """

    block_size: int
    token_bytes: int
    state_bytes: int
    page_bytes: int
    pools: int
    groups: Groups
    window: int
    states: int = 1

    @property
    def block_bytes(self) -> int:
        """One block of the pool, all its layers together."""
        return self.page_bytes * self.pools

    def blocks(self, available: int) -> int:
        """How many blocks `available` bytes hold."""
        return max(0, available) // self.block_bytes

    def tokens(self, available: int, length: int, in_flight: int) -> int:
        """The size that the engine reports: what sequences of `length` tokens would hold, were blocks divisible."""
        return int(self.blocks(available) / self.blocks_of_sequence(length, in_flight) * length) if length else 0

    def blocks_of_sequence(self, length: int, in_flight: int) -> int:
        """Blocks of one sequence of `length` tokens, while `in_flight` more are scheduled.

        A sliding window keeps the last window - 1 tokens and those in flight, and may start inside a block.
        """
        full = -(-length // self.block_size)
        sliding = -(-min(self.window - 1 + in_flight, length) // self.block_size) + 1
        return self.groups.full * full + self.groups.sliding * sliding + self.groups.linear * self.states

    def longest(self, available: int, sequences: int, in_flight: int, most: int) -> int:
        """The longest length at which `sequences` sequences fit together, at most `most`; 0 where none does.

        One block of the pool is never given out: vLLM's null block.
        """
        blocks = self.blocks(available) - 1
        low, high = 0, most
        while low < high:
            length = (low + high + 1) // 2
            if sequences * self.blocks_of_sequence(length, in_flight) <= blocks:
                low = length
            else:
                high = length - 1
        return low

    def sequences(self, available: int, length: int, in_flight: int) -> int:
        """How many sequences of `length` tokens fit together."""
        return max(0, self.blocks(available) - 1) // self.blocks_of_sequence(length, in_flight)


def lay_out(model: Model, split: Split, dtype_bytes: int, block_size: int, *, keeps_prefixes: bool = True) -> Cache:
    """The layout on the GPU whose pipeline stage has most layers. `dtype_bytes`: a cached number.

    `keeps_prefixes`: prefixes are kept for later requests. A sequence then holds two states of each recurrent layer,
    the last at a block's end and the current one (MambaSpec.max_memory_usage_bytes, mode "align").

    A token and layer take 2 · KV heads on the rank · head_dim · dtype; heads are copied where there are too few.
    Of recurrent layers: the last kernel - 1 inputs of the convolution and value heads · value dim · key dim of state.
    """
    stage = max(range(split.pipeline), key=lambda stage: len(stage_layers(len(model.kinds), split, stage)))
    kinds = [model.kinds[layer] for layer in stage_layers(len(model.kinds), split, stage)]
    count: dict[LayerKind, int] = {"full": 0, "sliding": 0, "linear": 0}
    for kind in kinds:
        count[kind] += 1
    pools = _pools([number for number in count.values() if number])
    token_bytes = 2 * max(1, model.kv_heads // split.tensor) * model.head_dim * dtype_bytes
    state = _state_bytes(model, split, dtype_bytes) if count["linear"] else 0
    if state:
        # A page of attention must be as large as the state, so hybrid models get larger blocks.
        block_size = max(block_size, _ALIGNMENT * -(-state // (_ALIGNMENT * token_bytes)))
    groups = Groups(**{kind: -(-number // pools) for kind, number in count.items()})
    states = 2 if keeps_prefixes else 1
    return Cache(block_size, token_bytes, state, block_size * token_bytes, pools, groups, model.window, states)


def _pools(counts: list[int]) -> int:
    """Layers per group: the rarest kind's number, or the commonest's where that is less than 1.5 times as many."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _state_bytes(model: Model, split: Split, dtype_bytes: int) -> int:
    sizes = model.linear_attention
    if sizes is None:
        return 0
    convolution = 2 * sizes.key_dim * sizes.key_heads + sizes.value_dim * sizes.value_heads
    inputs = (sizes.conv_kernel - 1) * -(-convolution // split.tensor) * dtype_bytes
    heads = -(-sizes.value_heads // split.tensor)
    return inputs + heads * sizes.value_dim * sizes.key_dim * (sizes.state_bytes or dtype_bytes)
