"""Decoding of a large model in one engine, in several ways; scripts/gpu_e2e/measure.py explains them."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.steps import recording
from trials import profiles
from trials.decoding_streams import measure, prompt_logprobs
from trials.served import listen_for_decisions


def engine_arguments(arguments: argparse.Namespace) -> Any:
    """The engine's arguments, as `serve` on a V100 would have them, without a tokenizer."""
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
        worker_extension_cls="trials.decoding_ways.Bench",
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


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result before any measurement."""
    return {
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


def save(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the result as it is now."""
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


async def run(arguments: argparse.Namespace) -> None:
    """All measurements, written after each, so that a time limit leaves what was measured."""
    maker = make(arguments.make, arguments.model) if arguments.make else None
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.async_llm import AsyncLLM

    load_general_plugins()
    if maker is not None and maker.wait() != 0:
        raise SystemExit(f"scripts.gpu_e2e.synthetic exited with {maker.returncode}")
    result = described(arguments)
    if arguments.eager:
        keep_recorded(arguments.output.with_name(f"{arguments.output.stem}-recorded.py"))
    listener = listen_for_decisions()
    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(engine_arguments(arguments))
    result["decisions"] = listener.decisions
    for decision in listener.decisions:  # for `voltserve plan --against`
        print(json.dumps(decision), flush=True)
    result["load_seconds"] = round(time.perf_counter() - began, 1)
    result["memory"] = (await engine.collective_rpc("voltserve_memory"))[0]
    vocabulary = engine.model_config.get_vocab_size()
    await add_rows(engine, arguments, result, vocabulary)
    await add_profiles(engine, arguments, result, vocabulary)
    engine.shutdown()
    result["device"] = torch.cuda.get_device_name()
    if arguments.library:
        add_floor(result, read_ceiling(arguments.library))
    save(arguments, result)


async def add_rows(engine: Any, arguments: argparse.Namespace, result: dict[str, Any], vocabulary: int) -> None:
    """A row per way, with graphs and without, and per number of streams. The engine ends as it serves."""
    seed = 0
    kinds = (False,) if arguments.eager else (True,) if arguments.only_graphs else (True, False)
    current = "kernels"
    random = torch.Generator().manual_seed(1)
    texts = torch.randint(3, vocabulary, (4, arguments.prompt), generator=random).tolist()
    likelihoods: dict[str, torch.Tensor] = {}
    for way, graphs in itertools.product(arguments.ways, kinds):
        if way != current:
            await engine.collective_rpc("voltserve_way", args=(way,))
            current = way
        if way not in likelihoods:
            likelihoods[way] = await prompt_logprobs(engine, texts, way)
            result.update(of_texts(likelihoods))
        await engine.collective_rpc("voltserve_replay", args=(graphs or arguments.eager,))
        await measure(engine, 2, arguments.prompt, 4, vocabulary, seed := seed + 1)  # triggers late compilation
        # Eager steps of the reference way wait for the host as ours do: one row shows it.
        for streams in arguments.streams if graphs or way != "reference" else arguments.streams[:1]:
            for row in await rates(engine, arguments, streams, vocabulary, seed := seed + 1):
                result["rows"].append({"way": way, "graphs": graphs} | row)
                print(result["rows"][-1], flush=True)
            save(arguments, result)
    if current != "kernels":
        await engine.collective_rpc("voltserve_way", args=("kernels",))


async def rates(
    engine: Any, arguments: argparse.Namespace, streams: int, vocabulary: int, seed: int
) -> list[dict[str, Any]]:
    """One row. With --eager three rows of recorded steps and three of others, by turns: the machine's speed varies."""
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
        # A profiler makes long prompts slow. Its tables show launches and the host, which do not depend on them.
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
    """Adds the least time that reading the weights takes, and its share of a step."""
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
    """Bytes per second of a kernel that only reads."""
    from kernels.tools.native import Library
    from kernels.tools.timing import ceilings

    measured: Callable[[Any], dict[str, float]] = ceilings
    return measured(Library(library))["read"]
