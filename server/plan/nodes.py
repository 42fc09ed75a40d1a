"""A model that is split over machines: each one's share, and the traffic between two of them.

A machine is a pipeline stage; tensor parallelism stays inside it, where its all-reduces do not meet the network.
Per token of a step, a stage sends the hidden state and the residual to the next one. Both have the model's width and
the engine's dtype. vLLM's Ray executor sends them whole, from every rank to the same rank of the next stage
(vllm/v1/executor/ray_executor.py, _compiled_ray_dag). So tensor parallelism multiplies the traffic. Not counted: the
scheduler's output, some hundred bytes per request and step, and the tokens that return.
"""

from dataclasses import asdict, dataclass
from typing import Any

from server.plan.cache import Cache
from server.plan.memory import Plan, Run, gib
from server.plan.model import Model
from server.plan.weights import Split, stage_layers, stage_weights

NETWORKS_GBIT = (1, 10, 25)
# Of vLLM 0.28.0's generating models, the classes without `SupportsPP`: no layer can be left to another stage.
NO_STAGES = frozenset(
    {
        *("AriaForConditionalGeneration", "CohereAsrForConditionalGeneration", "DiffusionGemmaForBlockDiffusion"),
        *("FireRedASR2ForConditionalGeneration", "FireRedLIDForConditionalGeneration"),
        *("FunASRForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        *("HrmTextForCausalLM", "IQuestLoopCoderForCausalLM", "Idefics3ForConditionalGeneration"),
        *("Mamba2ForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"),
        *("NemotronH_Super_Omni_Reasoning_V3", "NemotronParseForConditionalGeneration"),
        *("PaddleOCRVLForConditionalGeneration", "Phi4MMForCausalLM", "SmolVLMForConditionalGeneration"),
        *("WhisperForConditionalGeneration", "Zamba2ForCausalLM"),
    }
)


@dataclass(frozen=True)
class Stage:
    """One machine's share, per GPU: decoder layers [`first`, `last`], weights, and cache per token."""

    first: int
    last: int
    gpus: int
    weights_bytes: int
    cache_bytes_per_token: int


@dataclass(frozen=True)
class Step:
    """The traffic of one microbatch of `tokens` from a machine to the next, and its time on a network."""

    name: str
    tokens: int
    bytes: int

    def seconds(self, gbit: float) -> float:
        """On an otherwise idle link of `gbit` Gbit/s, headers and latency left out."""
        return self.bytes * 8 / (gbit * 1e9)


@dataclass(frozen=True)
class Nodes:
    """The split over machines: `stages` in order; `steps` over each of the links between two of them."""

    stages: tuple[Stage, ...]
    token_bytes: int
    formula: str
    steps: tuple[Step, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = [
            {**asdict(step), "seconds": {f"{gbit}GbE": step.seconds(gbit) for gbit in NETWORKS_GBIT}}
            for step in self.steps
        ]
        stages = [asdict(stage) for stage in self.stages]
        return {"stages": stages, "token_bytes": self.token_bytes, "token_bytes_formula": self.formula, "steps": steps}

    def as_rows(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """The two tables for people: machines, and the network."""
        machines: list[tuple[str, ...]] = [("machine", "layers", "GPUs", "weights/GPU", "cache/GPU and token")]
        machines += [
            (f"{number}", f"{stage.first}-{stage.last}", f"{stage.gpus}", gib(stage.weights_bytes),
             f"{stage.cache_bytes_per_token / 1024:.0f} KiB")
            for number, stage in enumerate(self.stages)
        ]  # fmt: skip
        network: list[tuple[str, ...]] = [
            ("step", "tokens", "from one to the next", *(f"{gbit} GbE" for gbit in NETWORKS_GBIT))
        ]
        network += [
            (step.name, f"{step.tokens:,}", f"{step.bytes:,} B",
             *(f"{step.seconds(gbit) * 1e3:.2f} ms" for gbit in NETWORKS_GBIT))
            for step in self.steps
        ]  # fmt: skip
        return machines, network


def lay_over_nodes(model: Model, plan: Plan) -> Nodes:
    """The machines of a plan whose pipeline stages are one each.

    While all `run.sequences` decode, vLLM keeps one microbatch per stage in flight, each with its share of the
    sequences. A prefill fills a microbatch with `run.batched` tokens.
    """
    run, split = plan.run, plan.split
    token_bytes = split.tensor * 2 * model.hidden * run.dtype_bytes
    share = -(-run.sequences // split.pipeline)
    steps = [(name, tokens) for name, tokens in (("decode, 1 token", 1), ("decode", share), ("prefill", run.batched))]
    return Nodes(
        stages=tuple(_stage(model, plan.cache, run, split, stage) for stage in range(split.pipeline)),
        token_bytes=token_bytes,
        formula=f"{split.tensor} ranks · (hidden state + residual) · {model.hidden} · {run.dtype_bytes} B",
        steps=tuple(Step(name, tokens, tokens * token_bytes) for name, tokens in steps),
    )


def _stage(model: Model, cache: Cache, run: Run, split: Split, stage: int) -> Stage:
    layers = stage_layers(len(model.kinds), split, stage)
    weights = stage_weights(model, split, stage, run.form, run.dtype_bytes, run.embedding_bytes)
    attention = sum(model.kinds[layer] != "linear" for layer in layers)
    return Stage(layers.start, layers.stop - 1, split.tensor, weights.total, attention * cache.token_bytes)


def obstacle(model: Model, split: Split) -> str:
    """Why the model cannot be cut into the split's stages; empty where it can."""
    if split.pipeline == 1:
        return ""
    if model.architecture in NO_STAGES:
        return (
            f"--pipeline-parallel-size {split.pipeline}: vLLM 0.28.0's {model.architecture} cannot be cut into stages "
            "(it is no SupportsPP); take tensor parallelism, inside one machine"
        )
    if len(model.kinds) < split.pipeline:
        return (
            f"--pipeline-parallel-size {split.pipeline}: expected a layer for every stage, got {len(model.kinds)} "
            f"layers; lower it to {len(model.kinds)}"
        )
    return ""
