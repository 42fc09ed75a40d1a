"""Whether two engines' texts part because routers held two experts for all but equal.

    python -m scripts.gpu_e2e.routing ask QUESTIONS MODEL RECORD --other RECORD [engine flags …]
    python -m scripts.gpu_e2e.routing judge REFERENCE_RECORD OTHER_RECORD OUTPUT.json --device NAME --command COMMAND

A router takes the k experts of largest logits. Where the last that it takes and the first that it does not are closer
than rounding moves them, two engines take different experts, and from there on compute different things.

`ask` runs for both engines at once. It continues answers.py's prompts greedily, one after another, and keeps every
router's logits. Then it reads the other engine's texts twice: with experts of its own choice, and with those that the
other engine took. The latter leaves nothing but rounding between the two. Modules are watched, so the step must be
eager and not recorded (TORCH_COMPILE_DISABLE=1).
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_e2e.answers import TOKENS
from scripts.gpu_e2e.compare import GAP, first_difference

LIKELIEST = 5
WAIT_S = 120.0  # for the other engine
# Between two of a router's logits, in their deviation. Some 40 roundings of float16, 2^-11 / sqrt(3) each, lie between
# a token and the last layer's router; times sqrt(2) for two engines, and again for two logits; and four times that.
MARGIN = 2.0**-6
Record = dict[str, Any]


class Routers:
    """The routers' logits of one request after another, and, where asked for, the experts that they must choose."""

    def __init__(self, model: torch.nn.Module) -> None:
        gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self._logits: list[list[torch.Tensor]] = [[] for _ in gates]
        self._experts: list[list[torch.Tensor]] = [[] for _ in gates]
        self.top_k = next(module.top_k for module in model.modules() if hasattr(module, "top_k"))
        self._forced: torch.Tensor | None = None
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(self._hook(layer))

    def begin(self, forced: torch.Tensor | None = None) -> None:
        """Before a request. forced: int64 [positions, layers, k], the experts of each position and layer."""
        self._forced = forced
        for seen in (*self._logits, *self._experts):
            seen.clear()

    def seen(self) -> dict[str, torch.Tensor]:
        """Since `begin`: `logits` float32 [positions, layers, experts], and the `experts` int64 [positions, layers, k]
        that follow from them.
        """
        parts = {"logits": self._logits, "experts": self._experts}
        return {name: torch.stack([torch.cat(seen) for seen in layers], 1) for name, layers in parts.items()}

    def _hook(self, layer: int) -> Any:
        def hook(_gate: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            logits, bias = output
            start = sum(map(len, self._logits[layer]))
            self._logits[layer].append(logits.float().cpu())
            # As vLLM's router does it, so that equal logits mean the same experts.
            self._experts[layer].append(logits.float().softmax(-1).topk(self.top_k).indices.cpu())
            if self._forced is None:
                return output
            chosen = self._forced[start : start + len(logits), layer].to(logits.device)
            # The softmax over the rest is what a router that renormalizes makes of them.
            others = torch.full_like(logits, -torch.inf)
            return others.scatter(1, chosen, logits.gather(1, chosen)), bias

        return hook


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
    """What this engine thinks of the other's texts, `forced` to the experts that the other took."""
    read_texts = []
    for text in texts:
        tokens = text["prompt"] + [step["token"] for step in text["steps"]]
        # The other engine did not compute with its last token; which experts that takes matters no more.
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


def margins(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """By how much the last expert taken leads the first left out, in deviations; logits [..., experts]."""
    best = logits.topk(top_k + 1).values
    return (best[..., top_k - 1] - best[..., top_k]) / logits.std(-1)


def differing(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """bool [positions, layers]: whether experts [positions, layers, k] are others."""
    return torch.ne(one.sort().values, two.sort().values).any(-1)


def roots(differ: torch.Tensor) -> torch.Tensor:
    """Of `differ` [positions, layers], what no other difference came before: in a layer below, of any token so far.

    What a position's layer computes with is what the layers below made of this token and those before.
    """
    below = differ.int().cumsum(0).cumsum(1)  # of this and earlier positions, in this and lower layers
    before = torch.nn.functional.pad(below, (1, 0))[:, :-1]
    return differ & (before == 0)


def judge_text(reference: Record, other: Record, forced: Record, top_k: int) -> dict[str, Any] | None:
    """Where two texts part, what the routers did until then, and what of it is left with equal experts.

    `by_experts`: routers took different experts, first of all where the margin was below MARGIN, and made to take the
    reference's, the other engine has the reference's gap between the two tokens, within GAP.
    """
    parting = first_difference(reference["steps"], other["steps"])
    if parting is None:
        return None
    token = parting["token"]
    positions = len(reference["prompt"]) + token
    differ = differing(*(text["experts"][:positions] for text in (reference, other)))
    places = [
        {
            "position": place[0],
            "layer": place[1],
            "margins": [round(float(margins(text["logits"][place], top_k)), 5) for text in (reference, other)],
            "experts": [sorted(text["experts"][place].tolist()) for text in (reference, other)],
        }
        for place in map(tuple, roots(differ).nonzero().tolist())
    ]
    step, chosen = forced["steps"][token], str(parting["tokens"][1])
    kept = round(step["logprob"] - step["top"][chosen], 4) if chosen in step["top"] else None
    alike = None not in (kept, parting["gap"]) and abs(kept - parting["gap"]) <= GAP
    return parting | {
        "sets_that_differ": int(differ.sum()),
        "first_of_them": places,
        "gap_with_the_reference_s_experts": kept,
        "by_experts": bool(places) and alike and all(min(place["margins"]) < MARGIN for place in places),
    }


def apart(texts: list[Record], read_texts: list[Record]) -> list[float]:
    """By how much each token's log probability differs between who wrote the texts and who read them."""
    return [
        abs(one["logprob"] - two["logprob"])
        for text, seen in zip(texts, read_texts, strict=True)
        for one, two in zip(text["steps"], seen["steps"], strict=True)
    ]


def judge(reference: Record, other: Record) -> dict[str, Any]:
    """All texts; `passed` where all that part beyond GAP do so by experts."""
    top_k = reference["top_k"]
    partings = []
    for number, texts in enumerate(zip(reference["texts"], other["texts"], other["forced"], strict=True)):
        if (found := judge_text(*texts, top_k)) is not None:
            partings.append({"prompt": number} | found)
    pairs = list(zip(reference["texts"], other["free"], other["forced"], strict=True))
    differ = [differing(text["experts"], free["experts"]) for text, free, _ in pairs]
    first = [roots(one) for one in differ]
    at_roots = [margins(text["logits"], top_k)[one] for (text, _, _), one in zip(pairs, first, strict=True)]
    moved = [
        ((text["logits"] - seen["logits"]).abs() / text["logits"].std(-1, keepdim=True)).max().item()
        for text, _, seen in pairs
    ]
    every = torch.cat([margins(text["logits"], top_k).flatten() for text, _, _ in pairs])
    return {
        "passed": all(one["by_experts"] or (one["gap"] is not None and one["gap"] <= GAP) for one in partings),
        "gap_allowed": GAP,
        "margin_allowed": MARGIN,
        "texts": {"all": len(pairs), "equal": len(pairs) - len(partings)},
        "choices_of_experts": {
            "all": len(every),
            "median_margin": round(every.median().item(), 4),
            "below_the_margin_allowed": int((every < MARGIN).sum()),
            "differ": int(sum(one.sum() for one in differ)),
            "differ_first": int(sum(one.sum() for one in first)),
            "largest_margin_where_they_differ_first": _largest(at_roots),
        },
        "largest_difference_of_a_router_s_logits_with_equal_experts": round(max(moved), 5),
        "log_probabilities": {
            name: {"largest": round(max(values), 4), "mean": round(sum(values) / len(values), 5)}
            for name, values in (
                ("own_experts", apart(reference["texts"], other["free"])),
                ("the_reference_s_experts", apart(reference["texts"], other["forced"])),
                ("the_other_way_round_own_experts", apart(other["texts"], reference["free"])),
                ("the_other_way_round_the_other_s_experts", apart(other["texts"], reference["forced"])),
            )
        },
        "partings": partings,
    }


def _largest(parts: list[torch.Tensor]) -> float | None:
    joined = torch.cat(parts)
    return round(joined.max().item(), 5) if len(joined) else None


def main() -> int:
    """Asks, or judges and exits with 1 where a text parts for no reason that the routers give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("questions", type=Path)
    asking.add_argument("model", type=Path)
    asking.add_argument("record", type=Path)
    asking.add_argument("--other", type=Path, required=True, help="the record that the other engine writes")
    judging = commands.add_parser("judge")
    judging.add_argument("reference", type=Path)
    judging.add_argument("other", type=Path)
    judging.add_argument("output", type=Path)
    judging.add_argument("--device", required=True)
    judging.add_argument("--command", required=True)
    arguments, flags = parser.parse_known_args()
    if "questions" in arguments:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        ask(arguments, flags)
        return 0
    reference, other = (torch.load(path, weights_only=True) for path in (arguments.reference, arguments.other))
    head = {
        "what": "a random mixture of experts on our kernels and its dequantized twin on vLLM's: what routers chose",
        "provenance": "measured",
        "device": arguments.device,
        "command": arguments.command,
        "flags": other["flags"],
    }
    result = head | judge(reference, other)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
