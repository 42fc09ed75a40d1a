"""Streams of random prompts at an engine: rates, times to first token, log probabilities."""

import asyncio
import itertools
import json
import statistics
import time
import zlib
from typing import Any

import torch


async def stream(engine: Any, prompt: list[int], tokens: int, name: str) -> tuple[list[float], list[int]]:
    """When each token arrived, in seconds since the request, and the tokens."""
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
    """The log probability of each prompt's tokens except the first; one row per prompt."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    async def one(index: int, prompt: list[int]) -> list[float]:
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{name}-{index}"):
            last = output
        return [entry[token].logprob for token, entry in zip(prompt[1:], last.prompt_logprobs[1:], strict=True)]

    return torch.tensor([await one(index, prompt) for index, prompt in enumerate(prompts)], dtype=torch.float64)
