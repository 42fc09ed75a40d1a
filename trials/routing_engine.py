"""An engine in this process whose routers are watched: it writes texts, and reads another engine's."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from trials.answers import TOKENS
from trials.routing import Record, Routers

LIKELIEST = 5
WAIT_S = 120.0  # for the other engine


class Engine:
    """vLLM's engine with our plugins in this very process, so that its model's modules are at hand."""

    def __init__(self, flags: list[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from engine import launcher

        args = launcher.parse([*flags, "--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"])
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.LLM_CLASS)
        self._engine = LLMEngine.from_vllm_config(config)
        (self.routers,) = self._engine.apply_model(Routers)
        self._requests = 0

    def request(self, prompt: list[int], forced: torch.Tensor | None = None, **sampling: Any) -> Any:
        """One finished request; `routers` then hold its logits."""
        from vllm.sampling_params import SamplingParams

        self.routers.begin(forced)
        self._requests += 1
        parameters = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **sampling)
        self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, parameters)
        while True:
            for output in self._engine.step():
                if output.finished:
                    return output


def steps_of(tokens: list[int], logprobs: Any) -> list[dict[str, Any]]:
    """As answers.py writes them: of each token, its log probability, and those of the likeliest."""
    return [
        {"token": token, "logprob": step[token].logprob, "top": {str(key): one.logprob for key, one in step.items()}}
        for token, step in zip(tokens, logprobs, strict=True)
    ]


def write(engine: Engine, prompts: list[list[int]]) -> list[Record]:
    """The texts that this engine makes of the prompts."""
    texts = []
    for prompt in prompts:
        made = engine.request(prompt, max_tokens=TOKENS, logprobs=LIKELIEST).outputs[0]
        steps = steps_of(list(made.token_ids), made.logprobs)
        texts.append({"prompt": prompt, "steps": steps} | engine.routers.seen())
    return texts


def read(engine: Engine, texts: list[Record], *, forced: bool) -> list[Record]:
    """The other engine's texts, scored by this engine, `forced` to the other's experts or not."""
    read_texts = []
    for text in texts:
        tokens = text["prompt"] + [step["token"] for step in text["steps"]]
        # The other engine did not compute with its last token, so that token's experts do not matter.
        experts = torch.cat([text["experts"], text["experts"][-1:]]) if forced else None
        seen = engine.request(tokens, experts, max_tokens=1, prompt_logprobs=LIKELIEST)
        start = len(text["prompt"])
        steps = steps_of(tokens[start:], seen.prompt_logprobs[start:])
        routers = {name: part[: len(tokens) - 1] for name, part in engine.routers.seen().items()}
        read_texts.append({"steps": steps} | routers)
    return read_texts


def ask(arguments: argparse.Namespace, flags: list[str]) -> None:
    """Both parts. The record is written after the first, for the other engine, and again at the end."""
    prompts = json.loads(arguments.questions.read_text())["prompts"]
    engine = Engine(["--model", str(arguments.model), "--skip-tokenizer-init", *flags])
    record: Record = {"flags": flags, "top_k": engine.routers.top_k, "texts": write(engine, prompts)}
    save(record, arguments.record.with_suffix(".first"))
    texts = wait_for(arguments.other.with_suffix(".first"))["texts"]
    record |= {"free": read(engine, texts, forced=False), "forced": read(engine, texts, forced=True)}
    save(record, arguments.record)


def save(record: Record, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    torch.save(record, part)
    part.rename(path)


def wait_for(path: Path) -> Record:
    """Raises TimeoutError where the other engine's record does not come."""
    end = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path}: expected the other engine's record within {WAIT_S:.0f} s, got none")
        time.sleep(0.2)
    record: Record = torch.load(path, weights_only=True)
    return record
