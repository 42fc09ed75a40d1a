"""Plans the memory of one device: the engine's parts, and the rest for the key/value cache.

On a GPU the engine may use `utilization` of the card. That share holds the weights, the peak of activations and the
libraries' allocations; the rest is the cache (vllm/v1/worker/gpu_worker.py, determine_available_memory). The CUDA
context and NCCL's buffers exist before the engine measures, and must fit beside the share.
"""

from dataclasses import dataclass, replace
from typing import Literal

from server.plan.cache import Cache, lay_out
from server.plan.model import Model
from server.plan.weights import Split, WeightForm, Weights, weights_per_gpu
from server.units import GIB, MIB

# Stated, not computed: typical of torch 2.10 with CUDA 12.8, not measured on a V100.
CUDA_CONTEXT = 450 * MIB
NCCL_BUFFERS = 256 * MIB
LIBRARIES = 160 * MIB  # cuBLAS workspaces, kernels loaded when first used, fragments
CPU_PROCESSES = 1600 * MIB  # Python, torch and vLLM in two processes
DEQUANTIZE_TILE = 256 * MIB  # at most; large prefills dequantize a linear in tiles
# A row of logits: float32 copies before and after temperature, a sorted copy and its int64 indexes.
SAMPLER_BYTES = 4 + 4 + 4 + 8

Basis = Literal["computed", "stated"]


@dataclass(frozen=True)
class Device:
    """One card's memory as CUDA reports it, or the machine's available memory."""

    kind: Literal["gpu", "cpu"]
    memory_bytes: int


@dataclass(frozen=True)
class Run:
    """How the engine will run. `length` 0 asks for the longest that fits.

    `batched`: the most tokens of a step. `in_flight`: of all steps that are scheduled at once. `embedding_bytes`: bytes
    per number of an embedding or head that is stored in 16 bits. In quantized models the CPU kernels keep those in 16
    bits; everything else is in the engine's dtype. `cache_bytes`: the cache's size where it is given; 0 means the rest
    of the memory. `keeps_prefixes`: prefix caching is on.
    """

    length: int
    sequences: int
    batched: int
    in_flight: int
    utilization: float
    dtype_bytes: int
    embedding_bytes: int
    cache_dtype_bytes: int
    form: WeightForm
    block_size: int
    cache_bytes: int = 0
    keeps_prefixes: bool = True


@dataclass(frozen=True)
class Item:
    """A part of the memory: its bytes, and their formula."""

    name: str
    bytes: int
    formula: str
    basis: Basis


@dataclass(frozen=True)
class Plan:
    """One device's memory. `items` fill `budget_bytes`, `outside` fills the rest; `problems`: what can't fit.

    `short_of_memory`: nothing else is wrong, so that a larger card would do. `length` is the context that would be
    served; `longest` the longest at which all `run.sequences` fit together.
    """

    split: Split
    device: Device
    run: Run
    budget_bytes: int
    items: tuple[Item, ...]
    outside: tuple[Item, ...]
    load_peak: Item
    cache: Cache
    cache_bytes: int
    length: int
    longest: int
    problems: tuple[str, ...]
    short_of_memory: bool = False

    @property
    def fits(self) -> bool:
        """Whether the engine can start."""
        return not self.problems

    @property
    def tokens(self) -> int:
        """The cache's size in tokens, as the engine reports it."""
        return self.cache.tokens(self.cache_bytes, self.length, self.run.in_flight)

    @property
    def together(self) -> int:
        """How many sequences of the full `length` fit at once; more wait, or give their blocks up and start again."""
        return self.cache.sequences(self.cache_bytes, self.length, self.run.in_flight) if self.length else 0


def make_plan(model: Model, device: Device, run: Run, split: Split) -> Plan:
    """The memory of the fullest device of `split`."""
    weights = weights_per_gpu(model, split, run.form, run.dtype_bytes, run.embedding_bytes)
    cache = lay_out(model, split, run.cache_dtype_bytes, run.block_size, keeps_prefixes=run.keeps_prefixes)
    items = [*_weight_items(model, weights, run, split), _activations(model, weights, run, split)]
    outside: list[Item] = []
    if device.kind == "gpu":
        budget = int(device.memory_bytes * run.utilization)
        items.append(Item("libraries", LIBRARIES, "cuBLAS workspaces, kernels, fragments", "stated"))
        outside.append(Item("CUDA context", CUDA_CONTEXT, "context and loaded modules", "stated"))
        if split.gpus > 1:
            outside.append(Item("NCCL", NCCL_BUFFERS, "channels and buffers between the GPUs", "stated"))
    else:
        budget = device.memory_bytes
        items.append(Item("processes", CPU_PROCESSES, "Python, torch and vLLM", "stated"))
    left = budget - sum(item.bytes for item in items)
    available = run.cache_bytes or max(0, left)
    most = run.length or model.positions
    length = run.length or cache.longest(available, 1, run.in_flight, most)
    plan = Plan(
        split=split,
        device=device,
        run=run,
        budget_bytes=budget,
        items=tuple(items),
        outside=tuple(outside),
        load_peak=_load_peak(weights, run),
        cache=cache,
        cache_bytes=available,
        length=length,
        longest=cache.longest(available, run.sequences, run.in_flight, model.positions),
        problems=(),
    )
    too_long, too_large = _beyond_positions(plan, model.positions), _problems(plan, left, model.positions)
    return replace(plan, problems=(*too_long, *too_large), short_of_memory=bool(too_large) and not too_long)


def _weight_items(model: Model, weights: Weights, run: Run, split: Split) -> list[Item]:
    eights = any(linear.kind.element == "E4M3" for linear in model.linears)
    packed = "Σ N·K/2 codes + N·K/g scales + 4·N row factors" + (", FP8: N·K codes + 4·N scales" if eights else "")
    dense = f"Σ N·K · {run.dtype_bytes} B, dequantized at load"
    share = f" over {split}" if split.gpus > 1 else ""
    return [
        Item(
            "4- and 8-bit weights" if eights else "4-bit weights",
            weights.linears,
            (packed if run.form == "packed" else dense) + share,
            "computed",
        ),
        Item(
            "other weights",
            weights.plain,
            f"embeddings and head · {run.embedding_bytes} B, norms and ignored layers · {run.dtype_bytes} B{share}",
            "computed",
        ),
    ]


def _activations(model: Model, weights: Weights, run: Run, split: Split) -> Item:
    """The peak of a step of `batched` tokens, or of the sampling that follows it for all sequences: the larger of both.

    A layer holds the residual stream and its norm (2·hidden) at once. To these it adds attention's q, k, v and output,
    or the MLP's gate, up and their product. Experts have a row per token and expert: gate, up and product, then product
    and output.
    """
    attention = 2 * (model.heads + max(model.kv_heads, split.tensor)) * model.head_dim // split.tensor
    if sizes := model.linear_attention:
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        attention = max(attention, (4 * keys + 4 * values) // split.tensor)
    widest = max(attention, 3 * model.intermediate // split.tensor)
    if experts := model.experts:
        inner = experts.intermediate // split.tensor
        widest = max(widest, experts.per_token * max(3 * inner, inner + model.hidden))
    step = run.batched * (2 * model.hidden + widest) * run.dtype_bytes
    tile = min(DEQUANTIZE_TILE, 2 * weights.largest * run.dtype_bytes) if run.form == "packed" else 0
    sampling = run.sequences * model.vocabulary * (run.dtype_bytes + SAMPLER_BYTES)
    formula = (
        f"max({run.batched} tokens · (2·{model.hidden} + {widest}) · {run.dtype_bytes} B + {tile // MIB} MiB tile, "
        f"{run.sequences} sequences · {model.vocabulary} · {run.dtype_bytes + SAMPLER_BYTES} B)"
    )
    return Item("activations", max(step + tile, sampling), formula, "computed")


def _load_peak(weights: Weights, run: Run) -> Item:
    """All weights, plus a second copy of the linear that is being loaded.

    Where weights are dequantized, each packed tensor is freed once its dense one exists. So only the last one is there
    twice.
    """
    extra = weights.largest
    what = "all weights + one linear's copy"
    if run.form == "dense":
        # quant dequantizes through float32: the linear's values once more in 4 bytes.
        extra = weights.largest // run.dtype_bytes * 4
        what = "all weights, dequantized + one linear in float32"
    return Item("load-time peak", weights.total + extra, what, "computed")


def _beyond_positions(plan: Plan, positions: int) -> list[str]:
    if plan.run.length <= positions:
        return []
    return [f"--max-model-len {plan.run.length} is beyond the model's {positions} positions; lower it to {positions}"]


def _problems(plan: Plan, left: int, positions: int) -> list[str]:
    problems = []
    if plan.device.kind == "gpu":
        rest = plan.device.memory_bytes - plan.budget_bytes
        outside = sum(item.bytes for item in plan.outside)
        if outside > rest:
            share = (plan.device.memory_bytes - outside) / plan.device.memory_bytes
            problems.append(
                f"{gib(outside)} of context and buffers do not fit beside --gpu-memory-utilization "
                f"{plan.run.utilization:g}, which leaves {gib(rest)}; lower it to {int(share * 100) / 100:g}"
            )
    needed = sum(item.bytes for item in plan.items)
    cache_bytes = plan.run.cache_bytes
    if left <= 0 or left < cache_bytes:
        parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in plan.items)
        cache = f", cache {gib(cache_bytes)}" if cache_bytes else ""
        problems.append(
            f"{gib(needed + cache_bytes)} are needed of {gib(plan.budget_bytes)} before any context: {parts}{cache}; "
            "split the model over more GPUs (--tensor-parallel-size), or take a smaller one"
        )
    elif plan.length == 0 or plan.cache.blocks_of_sequence(plan.length, plan.run.in_flight) > plan.cache.blocks(
        plan.cache_bytes
    ):
        longest = plan.cache.longest(plan.cache_bytes, 1, plan.run.in_flight, positions)
        need = plan.cache.blocks_of_sequence(plan.length, plan.run.in_flight) * plan.cache.block_bytes
        remedy = (
            f"lower --max-model-len to {longest}" if longest else "lower --max-num-seqs or --max-num-batched-tokens"
        )
        problems.append(
            f"one sequence of --max-model-len {plan.length} needs {gib(need)} of cache and {gib(plan.cache_bytes)} are "
            f"left of {gib(plan.budget_bytes)}; {remedy}"
        )
    return problems


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB / 10 else f"{count / MIB:.1f} MiB"
