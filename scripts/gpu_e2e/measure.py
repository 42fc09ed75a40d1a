"""Measures decoding of a large model in one engine: eager and CUDA graphs, our products and the reference way.

    python -m scripts.gpu_e2e.measure MODEL OUTPUT [--make SHAPE] [--eager] [--streams 1 8 16 32] [--tokens 64]
        [--library FILE.so] …

--make writes MODEL first, of a shape of synthetic.py, while vLLM is imported. --library: libvoltserve_cuda.so, whose
kernel that only reads is the yardstick. --eager: as `serve --enforce-eager`, whose steps are recorded and fused
(engine/steps/recording.py), in turns with steps of the model's modules. Without it, eager steps are of the modules.

Ways: `kernels`, as it is served; `unfused`, the model's modules captured, neither recorded nor fused; `nccl`, with
NCCL's all-reduces in place of ours; `reference`, the modules, with each weight dequantized to float16 and multiplied by
cuBLAS, on every call. Else model, cache, attention, sampling and engine are the same, in one process. Prompts are
random.
Profiles come last: what torch's profiler has once looked at launches kernels more slowly ever after.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from vllm.distributed.parallel_state import get_tp_group

from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.steps import recording
from engine.steps.graph_check import GraphSwitch
from scripts.gpu_e2e import profiles
from scripts.gpu_e2e.served import listen_for_decisions
from scripts.gpu_e2e.synthetic import SHAPES


class Bench(profiles.Profilers, GraphSwitch):
    """What vLLM's worker gains for these measurements."""

    device: Any
    _modules = False

    def voltserve_way(self, way: str) -> int:
        """From now on computes steps in this way, in graphs captured anew; returns how many layers multiply so."""
        methods = [
            module.quant_method
            for module in self.model_runner.get_model().modules()
            if isinstance(getattr(module, "quant_method", None), QuasarNvfp4LinearMethod)
        ]
        product = dequantize_and_multiply if way == "reference" else torch.ops.voltserve.nvfp4_linear.default
        for method in methods:
            method._gemm = product
        communicator = get_tp_group().device_communicator
        if communicator is not None:  # one rank has none
            self._own_all_reduce = getattr(self, "_own_all_reduce", communicator._ours)
            communicator._ours = None if way == "nccl" else self._own_all_reduce
        self._modules = way in OF_MODULES
        if self.voltserve_captured_sizes():
            self.voltserve_replay(True)
            self.model_runner.model.clear_graphs()
            torch.cuda.empty_cache()
            self.model_runner.capture_model()
        return len(methods)

    def voltserve_replay(self, wanted: bool) -> None:
        """As the original, but for ways that run the model's modules."""
        super().voltserve_replay(wanted)
        if self._modules:
            recording.use_recorded(self.model_runner.get_model(), False)

    def voltserve_memory(self) -> dict[str, int]:
        """Bytes on this GPU."""
        held = {tensor.data_ptr(): tensor.nbytes for tensor in self.model_runner.get_model().parameters()}
        model = self.model_runner.get_model()
        embedding = getattr(model, "language_model", model).model.embed_tokens.weight
        free, total = torch.cuda.mem_get_info()
        return {
            "weights": sum(held.values()),
            "weights_read_a_step": sum(held.values()) - embedding.nbytes,
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "used_on_the_gpu": total - free,
        }


WAYS = ("kernels", "unfused", "reference", "nccl")
OF_MODULES = ("unfused", "reference")


def dequantize_and_multiply(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, group: int, bias: Any
) -> torch.Tensor:
    """x Wᵀ + bias, with W written out in float16 first."""
    weight = torch.ops.voltserve.nvfp4_dequantize(packed, scales, factor, group, torch.float16)
    return functional.linear(x, weight, bias)


async def stream(engine: Any, prompt: list[int], tokens: int, name: str) -> tuple[list[float], list[int]]:
    """When each token came, in seconds since the request, and the tokens."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    began = time.perf_counter()
    times: list[float] = []
    text: list[int] = []
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
        times += [time.perf_counter() - began] * len(output.outputs[0].token_ids)
        text += output.outputs[0].token_ids
    return times, text


async def measure(engine: Any, streams: int, prompt: int, tokens: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """Rates while all streams decode, times to the first token, and a checksum of the greedy texts."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (streams, prompt), generator=random).tolist()
    began = time.perf_counter()
    outputs = await asyncio.gather(
        *(stream(engine, ids, tokens, f"{seed}-{index}") for index, ids in enumerate(prompts))
    )
    wall = time.perf_counter() - began
    all_times = [times for times, _ in outputs]
    last_first = max(times[0] for times in all_times)
    first_last = min(times[-1] for times in all_times)
    steady = sum(sum(last_first < moment <= first_last for moment in times) for times in all_times)
    steps = [after - before for times in all_times for before, after in itertools.pairwise(times)]
    return {
        "streams": streams,
        "decode_tokens_s": round(steady / (first_last - last_first), 2),
        "total_tokens_s": round(streams * tokens / wall, 2),
        "step_ms_median": round(1e3 * statistics.median(steps), 3),
        "first_token_ms_median": round(1e3 * statistics.median(times[0] for times in all_times), 1),
        "texts_crc32": zlib.crc32(json.dumps([text for _, text in outputs]).encode()),
    }


async def prompt_logprobs(engine: Any, prompts: list[list[int]], name: str) -> torch.Tensor:
    """Of each prompt's tokens but the first, the log probability; one row a prompt."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    async def one(index: int, prompt: list[int]) -> list[float]:
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{name}-{index}"):
            last = output
        return [entry[token].logprob for token, entry in zip(prompt[1:], last.prompt_logprobs[1:], strict=True)]

    return torch.tensor([await one(index, prompt) for index, prompt in enumerate(prompts)], dtype=torch.float64)


def engine_arguments(arguments: argparse.Namespace) -> Any:
    """The engine's, as `serve` on a V100 would have them, without a tokenizer."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=str(arguments.model),
        dtype="float16",
        load_format="voltserve",
        tensor_parallel_size=arguments.ranks,
        skip_tokenizer_init=True,
        max_model_len=max(2048, arguments.prompt + max(arguments.tokens, profiles.TOKENS) + 1),
        max_num_seqs=max(arguments.streams),
        gpu_memory_utilization=arguments.memory,
        kv_cache_memory_bytes=arguments.cache_bytes,
        enable_prefix_caching=False,
        language_model_only=True,
        worker_extension_cls="scripts.gpu_e2e.measure.Bench",
        enforce_eager=arguments.eager,
        compilation_config={} if arguments.eager else {"cudagraph_capture_sizes": graph_sizes(arguments.streams)},
        disable_custom_all_reduce=arguments.nccl,
        attention_backend=arguments.attention,
        disable_log_stats=True,
    )


def graph_sizes(streams: list[int]) -> list[int]:
    """The batches that are captured."""
    return sorted({1, 2, 4, 8, 16, max(streams)})


def keep_recorded(path: Path) -> None:
    """Writes what a step is recorded as (engine/steps/recording.py) to `path`, as Python."""
    original = recording.replay

    def replay(module: Any, inputs: Any) -> Any:
        step = original(module, inputs)
        path.write_text(module.code)
        return step

    patched: Any = recording
    patched.replay = replay


async def run(arguments: argparse.Namespace) -> None:
    """All measurements, written after each, so that a time limit leaves what was measured."""
    maker = make(arguments.make, arguments.model) if arguments.make else None
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.async_llm import AsyncLLM

    load_general_plugins()
    if maker is not None and maker.wait() != 0:
        raise SystemExit(f"scripts.gpu_e2e.synthetic exited with {maker.returncode}")
    result: dict[str, Any] = {
        "what": "decoding on the GPU named, through vLLM and the overlay",
        "provenance": "measured",
        "device": "",
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "shape": arguments.model.name,
        "prompt_tokens": arguments.prompt,
        "tokens": arguments.tokens,
        "ranks": arguments.ranks,
        "eager": arguments.eager,
        "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "rows": [],
    }

    def save() -> None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    if arguments.eager:
        keep_recorded(arguments.output.with_name(f"{arguments.output.stem}-recorded.py"))
    listener = listen_for_decisions()
    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(engine_arguments(arguments))

    async def call(name: str, *args: Any) -> Any:
        return (await engine.collective_rpc(name, args=args))[0]

    result["decisions"] = listener.decisions
    for decision in listener.decisions:  # for `voltserve plan --against`
        print(json.dumps(decision), flush=True)
    result["load_seconds"] = round(time.perf_counter() - began, 1)
    result["memory"] = await call("voltserve_memory")
    vocabulary = engine.model_config.get_vocab_size()
    seed = 0
    kinds = (False,) if arguments.eager else (True,) if arguments.only_graphs else (True, False)
    ways = [(way, graphs) for way in arguments.ways for graphs in kinds]
    current = "kernels"
    random = torch.Generator().manual_seed(1)
    texts = torch.randint(3, vocabulary, (4, arguments.prompt), generator=random).tolist()
    likelihoods: dict[str, torch.Tensor] = {}
    for way, graphs in ways:
        if way != current:
            await call("voltserve_way", way)
            current = way
        if way not in likelihoods:
            likelihoods[way] = await prompt_logprobs(engine, texts, way)
            result |= of_texts(likelihoods)
        await call("voltserve_replay", graphs or arguments.eager)
        await measure(engine, 2, arguments.prompt, 4, vocabulary, seed := seed + 1)  # compiles what is compiled late
        # Eager steps of the reference way wait for the host as ours do: one row shows it.
        for streams in arguments.streams if graphs or way != "reference" else arguments.streams[:1]:
            for row in await rates(engine, arguments, streams, vocabulary, seed := seed + 1):
                result["rows"].append({"way": way, "graphs": graphs} | row)
                print(result["rows"][-1], flush=True)
            save()
    if current != "kernels":
        await call("voltserve_way", "kernels")
    await add_profiles(engine, arguments, result, vocabulary)
    engine.shutdown()
    result["device"] = torch.cuda.get_device_name()
    if arguments.library:
        add_floor(result, read_ceiling(arguments.library))
    save()


async def rates(
    engine: Any, arguments: argparse.Namespace, streams: int, vocabulary: int, seed: int
) -> list[dict[str, Any]]:
    """One row; with --eager three of recorded steps and three of steps that are not, in turns, since a machine's
    processors are not equally fast all the time.
    """
    given = (streams, arguments.prompt, arguments.tokens, vocabulary, seed)
    if not arguments.eager:
        return [await measure(engine, *given)]
    rows = []
    for recorded in (True, False) * 3:
        await engine.collective_rpc("voltserve_replay", args=(recorded,))
        rows.append({"recorded": recorded} | await measure(engine, *given))
    return rows


async def add_profiles(engine: Any, arguments: argparse.Namespace, result: dict[str, Any], vocabulary: int) -> None:
    """How long steps in graphs wait for the host, and beside the output where a step's time goes."""

    async def decode(streams: int, tokens: int) -> None:
        await measure(engine, streams, arguments.prompt, tokens, vocabulary, 10_000 + streams)

    async def decode_short(streams: int, tokens: int) -> None:
        # A profiler makes long prompts slow, and its tables tell of launches and the host, which do not care.
        await measure(engine, streams, min(arguments.prompt, 128), tokens, vocabulary, 10_000 + streams)

    if not arguments.eager:
        await engine.collective_rpc("voltserve_replay", args=(True,))
        steps = {
            row["streams"]: row["step_ms_median"]
            for row in result["rows"]
            if (row["way"], row["graphs"]) == ("kernels", True)
        }
        result["beside"] = [
            await profiles.beside(engine, decode, streams, step_ms) for streams, step_ms in steps.items()
        ]
        print(result["beside"], flush=True)
    for graphs in (True,) if arguments.only_graphs else (False,) if arguments.eager else (True, False):
        await engine.collective_rpc("voltserve_replay", args=(graphs or arguments.eager,))
        await profiles.write(engine, decode_short, arguments.output, "graphs" if graphs else "eager")


def add_floor(result: dict[str, Any], bytes_s: float) -> None:
    """Adds how long reading the weights takes at least, and the share of a step that this is."""
    result["read_ceiling_bytes_s"] = bytes_s
    result["floor_ms"] = round(1e3 * result["memory"]["weights_read_a_step"] / bytes_s, 3)
    for row in result["rows"]:
        row["of_floor"] = round(result["floor_ms"] / row["step_ms_median"], 3)


def of_texts(likelihoods: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """The perplexity of each way so far, and how far the two lie apart, printed once both are known."""
    found: dict[str, dict[str, float]] = {
        "perplexity": {way: float((-log.mean()).exp()) for way, log in likelihoods.items()}
    }
    for key, other in (("agreement", "reference"), ("agreement_with_unfused", "unfused")):
        if {"kernels", other} <= likelihoods.keys():
            found[key] = agreement(likelihoods["kernels"], likelihoods[other])
            print(key, found[key], flush=True)
    return found


def agreement(ours: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """How far the log probabilities of the same tokens lie apart, ours and with every weight dequantized first."""
    difference = (ours - reference).abs()
    return {
        "tokens": difference.numel(),
        "largest_log_probability_difference": round(float(difference.max()), 5),
        "mean_log_probability_difference": round(float(difference.mean()), 6),
        "perplexity": round(float((-ours.mean()).exp()), 3),
        "reference_perplexity": round(float((-reference.mean()).exp()), 3),
    }


def make(shape: str, model: Path) -> "subprocess.Popen[bytes]":
    """Starts writing the checkpoint, on the GPU."""
    command = [sys.executable, "-m", "scripts.gpu_e2e.synthetic", shape, str(model), "--device", "cuda"]
    return subprocess.Popen(command)


def read_ceiling(library: Path) -> float:
    """Bytes a second that a kernel reads which does nothing else."""
    from kernels.tools.native import Library
    from kernels.tools.timing import ceilings

    measured: Callable[[Any], dict[str, float]] = ceilings
    return measured(Library(library))["read"]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--make", choices=SHAPES)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--cache-bytes", type=int, help="the cache's; else it follows from --memory")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--only-graphs", action="store_true", help="no eager steps beside graphs")
    parser.add_argument("--attention", help="vLLM's name of the attention backend; else the platform's choice")
    parser.add_argument("--nccl", action="store_true", help="for every all-reduce")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel GPUs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kernels", "reference"])
    arguments = parser.parse_args()
    if arguments.eager and "reference" in arguments.ways:
        parser.error("--eager: expected --ways without reference, since a recorded step keeps how it multiplies")
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
