"""Compares CUDA graphs and recorded steps with the model's own modules before the engine is ready.

Both can be wrong without an error:

- A captured graph replays the addresses and launch sizes of its capture. A kernel may read memory that has moved since,
  or depend on a value that the host computed then.
- A recorded step, from which graphs are captured, calls fused kernels in place of the modules (engine/steps/fusion.py).

So fixed prompts are decoded first by the modules, then once in batches of each captured size. For the same tokens the
log probabilities must agree up to rounding. If they do not, the modules serve. Greedy tokens alone are no measure: a
batch of another size sums in another order, and near ties may flip.

`GraphSwitch` is mixed into vLLM's worker (`--worker-extension-cls`). Its methods are called in every rank.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from engine.steps import recording
from engine.volta import Choice

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

WHAT = "CUDA graphs against eager steps"
WHAT_RECORDED = "recorded steps against the model's modules"
TOKENS = 16  # decoded per prompt
CANDIDATES = 4  # tokens whose log probabilities are kept per step
# In natural logarithms. float16 rounding moves those of a 32B model by a few hundredths, a stale input by whole units.
TOLERANCE = 0.3
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils",
    "Once upon a time, in a village at the edge of a large forest, there lived a clockmaker who",
    "床前明月光，疑是地上霜。",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer",
)


class GraphSwitch:
    """Methods that vLLM's worker gains. Nothing else in vLLM has these names."""

    model_runner: Any  # the worker's

    def voltserve_captured_sizes(self) -> list[int]:
        """The batch sizes, in sequences, for which a whole decoding step is captured."""
        keys = self.model_runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        return sorted({key.num_tokens for key in keys})

    def voltserve_is_recorded(self) -> bool:
        """Whether steps of the model are recorded."""
        return bool(recording.recorded_modules(self.model_runner.get_model()))

    def voltserve_replay(self, wanted: bool) -> None:
        """From now on replays graphs and recorded steps, or runs the model's modules in every step."""
        recording.use_recorded(self.model_runner.get_model(), wanted)
        dispatcher = self.model_runner.cudagraph_dispatcher
        mode = self.model_runner.compilation_config.cudagraph_mode
        dispatcher.cudagraph_mode = mode if wanted else CUDAGraphMode.NONE


EXTENSION = f"{__name__}.{GraphSwitch.__name__}"


@dataclass(frozen=True)
class Step:
    """One greedy step: its token, and the log probabilities of that token and the likeliest others."""

    token: int
    logprobs: Mapping[int, float]


async def check(engine: "EngineClient") -> Choice:
    """Compares, leaves graphs and recorded steps on if they agree, and returns which serve and why."""
    captured: list[int] = (await engine.collective_rpc("voltserve_captured_sizes"))[0]
    recorded: bool = (await engine.collective_rpc("voltserve_is_recorded"))[0]
    if not captured and not recorded:
        return Choice(WHAT, "eager steps", "no graph of a decoding step was captured, and no step recorded")
    what, served = (WHAT, "graphs") if captured else (WHAT_RECORDED, "recorded steps")
    sizes = captured or [len(PROMPTS)]
    await engine.collective_rpc("voltserve_replay", args=(False,))
    eager = await _decode(engine, max(sizes))
    await engine.collective_rpc("voltserve_replay", args=(True,))
    compared = 0
    for size in sizes:
        replayed = await _decode(engine, size)
        for number, (one, other) in enumerate(zip(eager, replayed, strict=False)):
            same, problem = compare(one, other)
            compared += same
            if problem:
                await engine.collective_rpc("voltserve_replay", args=(False,))
                where = f"batch of {size}, sequence {number}, {problem}"
                return Choice(what, "differ: eager steps instead", where)
    reason = f"{compared} tokens agree within {TOLERANCE} in batches of {', '.join(map(str, sizes))}"
    return Choice(what, f"agree: {served} are used", reason)


def compare(eager: Sequence[Step], graphs: Sequence[Step]) -> tuple[int, str]:
    """How many steps agree, and what is wrong with the first that does not, or "".

    Steps are comparable while all earlier tokens are the same. A different token counts as rounding if eager steps gave
    both tokens log probabilities within TOLERANCE. It ends the comparison.
    """
    for index, (one, other) in enumerate(zip(eager, graphs, strict=True)):
        expected, got = one.logprobs[one.token], other.logprobs.get(one.token)
        if got is None or not abs(expected - got) <= TOLERANCE:  # NaN, too
            shown = "not among the likeliest" if got is None else f"{got:.3f}"
            return index, f"token {index}: expected log probability {expected:.3f} of {one.token}, got {shown}"
        if one.token != other.token:
            near = one.logprobs.get(other.token)
            if near is None or not abs(expected - near) <= TOLERANCE:
                return index, f"token {index}: expected {one.token}, got {other.token}, which eager steps find unlikely"
            return index, ""
    return len(eager), ""


async def _decode(engine: "EngineClient", size: int) -> list[list[Step]]:
    """Decodes `size` prompts together. The cache is emptied first, since cached prompts would be split differently."""
    await engine.reset_prefix_cache()
    texts = itertools.islice(itertools.cycle(PROMPTS), size)
    # Without a tokenizer the bytes are the tokens: every vocabulary has 256.
    as_ids = engine.model_config.skip_tokenizer_init
    prompts = [TokensPrompt(prompt_token_ids=list(text.encode())) if as_ids else text for text in texts]
    return await asyncio.gather(*(_generate(engine, prompt, f"graph-check-{i}") for i, prompt in enumerate(prompts)))


async def _generate(engine: "EngineClient", prompt: str | TokensPrompt, name: str) -> list[Step]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=CANDIDATES, detokenize=False)
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, params, name):
        last = output
    if last is None:
        raise RuntimeError(f"{name}: expected {TOKENS} tokens, got none")
    made = last.outputs[0]
    steps = zip(made.token_ids, made.logprobs or (), strict=True)
    return [Step(token, {key: value.logprob for key, value in logprobs.items()}) for token, logprobs in steps]
