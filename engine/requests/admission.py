"""Checks of a request before it enters the batch, in addition to vLLM's own.

Each refusal is vLLM's own error. Clients get a 400 that names the field.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import split_enc_dec_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# Beyond these ranges a sampler's logits become infinite or NaN. vLLM bounds the other numbers.
RANGES = {"repetition_penalty": (1e-6, 1e6)}
# The most entries. Python loops over these lists at each token while all requests wait. Each of `n` is a request.
MOST = {"stop": 256, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 4096, "n": 128}
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
SHOWN = 5  # wrong entries of a list that an error shows


def check(prompt: Any, params: SamplingParams | PoolingParams, request_id: str, model: ModelConfig) -> None:
    """Raises VLLMValidationError if a request could harm others.

    Args:
        prompt: as vLLM's renderer returns it; other forms are not checked here.
        params: the request's parameters.
        request_id: a client may have chosen it.
        model: the served model.
    """
    vocabulary = model.get_vocab_size()
    if isinstance(prompt, dict) and "type" in prompt:
        for part in split_enc_dec_input(prompt):
            if part is not None:
                check_prompt(part, vocabulary)
        crosses("cache_salt", prompt.get("cache_salt"))
    crosses("request_id", request_id)
    if isinstance(params, SamplingParams):
        check_sampling(params, vocabulary)
        params._validate_logprobs(model)  # vLLM checks this, too, but only after a stream has begun
    check_crossing(params)


def check_prompt(prompt: Any, vocabulary: int) -> None:
    """Raises VLLMValidationError if the prompt has a token without an embedding."""
    tokens: Sequence[int] | None = prompt.get("prompt_token_ids")
    if not tokens or (max(tokens) < vocabulary and min(tokens) >= 0):
        return
    stand_in: set[int] = set()  # positions of an image's or a sound's embeddings
    for places in (prompt.get("mm_placeholders") or {}).values():
        for place in places:
            stand_in.update(range(place.offset, place.offset + place.length))
    _refuse_outside("prompt", (token for index, token in enumerate(tokens) if index not in stand_in), vocabulary)


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Raises VLLMValidationError if a number, a list's length or a token id is out of range."""
    for name, (lowest, highest) in RANGES.items():
        value = getattr(params, name)
        if not (math.isfinite(value) and lowest <= value <= highest):
            raise VLLMValidationError(f"{name}: expected {lowest:g} to {highest:g}, got {value:g}", parameter=name)
    for name, most in MOST.items():
        value = getattr(params, name) or ()
        count = value if isinstance(value, int) else len(value)
        if count > most:
            raise VLLMValidationError(f"{name}: expected at most {most}, got {count}", parameter=name)
    for name in TOKEN_LISTS:
        _refuse_outside(name, getattr(params, name) or (), vocabulary)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise VLLMValidationError("allowed_token_ids: expected at least one, got none", parameter="allowed_token_ids")
    if any(not word.strip() for word in params.bad_words or ()):
        raise VLLMValidationError("bad_words: expected words, got an empty one", parameter="bad_words")


def check_crossing(params: SamplingParams | PoolingParams) -> None:
    """Raises VLLMValidationError if `params` cannot be sent to the engine process.

    An exception while the engine decodes them would end its input. Text that is not Unicode (a lone surrogate), numbers
    beyond 64 bits and deep nesting cannot be sent.
    """
    try:
        MsgpackDecoder(type(params)).decode(MsgpackEncoder().encode(params))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        for name in params.__struct_fields__:
            crosses(name, getattr(params, name))
        raise VLLMValidationError(f"a parameter cannot be passed to the engine: {error}") from error


def crosses(name: str, value: Any) -> None:
    """Raises VLLMValidationError, naming the field, if `value` cannot be sent to the engine process."""
    try:
        MsgpackEncoder().encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = "text that is not Unicode" if isinstance(error, UnicodeError) else str(error)
        raise VLLMValidationError(f"{name} cannot be passed to the engine: {reason}", parameter=name) from error


def _refuse_outside(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        shown = ", ".join(map(str, wrong[:SHOWN])) + (", …" if len(wrong) > SHOWN else "")
        raise VLLMValidationError(
            f"{name}: expected token ids from 0 to {vocabulary - 1}, this model's vocabulary, got {shown}",
            parameter=name,
        )
