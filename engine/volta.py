"""The overlay's decisions on a Tesla V100: pure functions of the standard library, testable on any machine.

`engine.platform` carries the decisions out. `engine.explain` prints those that need no GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from engine.environment import FORCE_VOLTA
from engine.limits import HEAD_SIZES

CAPABILITY = (7, 0)
DTYPE = "float16"
# Model types whose activations overflow float16 or lose too much to its rounding. It is vLLM's own list
# (vllm/config/model.py); a test compares them.
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")


@dataclass(frozen=True)
class Gpu:
    """A visible GPU: its index in CUDA, name and compute capability."""

    index: int
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"GPU {self.index} {self.name} ({self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Choice:
    """One automatic choice with its reason. With a `problem` the engine must not start."""

    what: str
    choice: str
    reason: str
    problem: str | None = None


@dataclass(frozen=True)
class Attention:
    """An attention backend of vLLM's registry that sm_70 can run. Empty `head_sizes`: any size."""

    name: str
    reason: str
    head_sizes: tuple[int, ...] = ()


# In order of preference. FlashAttention needs compute capability 8.0, FlashInfer 7.5.
ATTENTION = (
    Attention("CUSTOM", "voltserve_kernels: tensor cores for prompts, the cache read once for decoding", HEAD_SIZES),
    Attention("TRITON_ATTN", "vLLM's paged attention in Triton, which runs on compute capability 7.0"),
    Attention("FLEX_ATTENTION", "PyTorch's, where Triton's paged attention does not take the layer"),
)


def choose_platform(gpus: Sequence[Gpu], *, forced: bool) -> Choice:
    """Chooses the platform for V100s (`choice` "Volta") or for CPUs ("CPU"), or refuses (`problem`)."""
    volta = [gpu for gpu in gpus if gpu.capability == CAPABILITY]
    listed = ", ".join(map(str, gpus))
    if forced and gpus:
        return Choice("platform", "Volta", f"forced by {FORCE_VOLTA}; found {listed}")
    if not gpus:
        return Choice("platform", "CPU", "no GPU is visible")
    if len(volta) == len(gpus):
        return Choice("platform", "Volta", f"every visible GPU has compute capability 7.0: {listed}")
    remedy = "start with --volta force, which treats every one as a V100"
    if volta:
        remedy = f"hide the others with CUDA_VISIBLE_DEVICES, or {remedy}"
    problem = (
        f"expected visible GPUs that all have compute capability 7.0, got {listed}. Our kernels are for those; {remedy}"
    )
    return Choice("platform", "Volta", "other GPUs", problem)


def choose_dtype(dtype: str, model_type: str) -> Choice:
    """The dtype of activations and 16-bit weights. `dtype`: the one that vLLM would use for this model."""
    if model_type in NO_FLOAT16:
        problem = f"model type {model_type!r} is numerically unstable in {DTYPE}, the one 16-bit dtype of a V100"
        return Choice("dtype", dtype, "", f"{problem}. Serve another model")
    if dtype == DTYPE:
        return Choice("dtype", DTYPE, "a V100 has tensor cores for float16 and no bfloat16")
    problem = (
        f"--dtype: expected {DTYPE} on a V100, whose tensor cores know no other dtype, got {dtype} for model type "
        f"{model_type!r}. Pass --dtype {DTYPE}"
    )
    return Choice("dtype", dtype, "", problem)


def choose_cache_dtype(asked: str, directive: str) -> Choice:
    """The dtype of cached keys and values.

    `asked`: --kv-cache-dtype, with the checkpoint's directive in place of auto. `directive`: that directive, or "auto".
    """
    what = "KV cache dtype"
    if asked in ("auto", DTYPE):
        return Choice(what, DTYPE, "as the activations; sm_70 has no 8-bit floating point")
    if asked == directive:
        return Choice(what, DTYPE, f"the checkpoint asks for {directive}, whose kernels do not compile for sm_70")
    problem = f"--kv-cache-dtype: expected auto or {DTYPE} on a V100, got {asked}, which does not compile for sm_70"
    return Choice(what, asked, "", problem)


def choose_attention(
    asked: str | None,
    head_size: int,
    rows: Sequence[Attention] = ATTENTION,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """The attention backend for heads of `head_size`.

    `asked`: --attention-backend. `refused`: backends that do not take the layer for another reason, by name.
    """
    what = "attention backend"
    if asked is not None:
        return Choice(what, asked, "--attention-backend asks for it")
    passed: list[str] = []
    for row in rows:
        if row.name in refused:
            passed.append(f"{row.name} does not take the layer: {refused[row.name]}")
        elif not row.head_sizes or head_size in row.head_sizes:
            return Choice(what, row.name, "; ".join([row.reason, *passed]))
        else:
            passed.append(f"{row.name} takes heads of {', '.join(map(str, row.head_sizes))}, not {head_size}")
    return Choice(what, "", "", f"{what}: expected one that takes heads of {head_size}, got none ({'; '.join(passed)})")


Links = Literal["nvlink", "pcie"]
Transport = Literal["host memory", "peer memory"]
ALL_REDUCE = "all-reduce"
# The key of the platform's choice in vLLM's additional_config, which reaches every worker.
ALL_REDUCE_KEY = "voltserve_all_reduce"


def choose_all_reduce(ranks: int, *, disabled: bool, links: Links, no_peers: bool, probe: str | None) -> Choice:
    """How ranks exchange sums of up to 1 MiB (engine/collective/all_reduce.py): a Transport, or NCCL.

    Larger sums always go through NCCL. `no_peers`: NCCL_P2P_DISABLE is set. `probe`: the problem of a write through
    peer memory that was read back. It is "" if every byte was right, None if it was not tried.
    """
    if ranks == 1:
        return Choice(ALL_REDUCE, "none", "one GPU computes alone")
    if disabled:
        return Choice(ALL_REDUCE, "NCCL", "--disable-custom-all-reduce asks for it")
    if links == "pcie":
        return Choice(ALL_REDUCE, "host memory", "peer memory over PCIe hangs or returns wrong data on many boards")
    if no_peers:
        return Choice(ALL_REDUCE, "host memory", "NCCL_P2P_DISABLE asks for no peer memory")
    if probe:
        return Choice(ALL_REDUCE, "host memory", f"peer memory was tried and is not to be trusted: {probe}")
    tried = "to be tried at the start" if probe is None else "what went through peer memory arrived unchanged"
    return Choice(ALL_REDUCE, "peer memory", f"all GPUs are joined by NVLink; {tried}")


def keep_all_reduce(transport: Transport, problem: str) -> Choice:
    """Keeps `transport`, or falls back to NCCL if the ranks' trial had a `problem` ("": none)."""
    if problem:
        return Choice(ALL_REDUCE, "NCCL", f"through {transport} the trial failed: {problem}")
    return Choice(ALL_REDUCE, transport, "the ranks' trial gave the right sums; more than 1 MiB goes through NCCL")


def choose_graphs(*, enforce_eager: bool) -> Choice:
    """Whether decoding steps are replayed as CUDA graphs."""
    if enforce_eager:
        return Choice("CUDA graphs", "off", "--enforce-eager asks for it")
    return Choice(
        "CUDA graphs",
        "full, of decoding steps, without compilation",
        "Triton and Inductor have no tensor cores on sm_70; compared with eager steps before the engine is ready",
    )


def choose_launchers(compiler: str) -> Choice:
    """Which code loads and launches Triton's kernels. `compiler`: the C compiler for Triton's launchers, or ""."""
    what = "launchers of Triton's kernels"
    if compiler:
        return Choice(what, "Triton's", f"compiled as they are needed by {compiler}")
    return Choice(
        what, "engine.triton_driver", "there is no C compiler with Python's headers to make Triton's own with"
    )


def explain(given: dict[str, Any]) -> list[Choice]:
    """The decisions that need no GPU.

    `given`: dtype, model_type, kv_cache_dtype, kv_directive, attention_backend, head_size, ranks, nvlink, no_peers,
    disable_custom_all_reduce, enforce_eager; as the arguments of the functions above.
    """
    return [
        choose_dtype(given["dtype"], given["model_type"]),
        choose_cache_dtype(given["kv_cache_dtype"], given["kv_directive"]),
        choose_attention(given["attention_backend"], given["head_size"]),
        choose_all_reduce(
            given["ranks"],
            disabled=given["disable_custom_all_reduce"],
            links="nvlink" if given["nvlink"] else "pcie",
            no_peers=given["no_peers"],
            probe=None,
        ),
        choose_graphs(enforce_eager=given["enforce_eager"]),
    ]
