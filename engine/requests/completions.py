"""Text completions: offsets that fit the text, and no token counted where none was asked for."""

from collections.abc import Sequence
from typing import Any


def correct(answer: dict[str, Any], request: Any, positions: dict[int, int]) -> None:
    """Corrects a completion, whole or an event of a stream, in place.

    Args:
        answer: the JSON object.
        request: vLLM's CompletionRequest.
        positions: of each choice, how many characters its text has had so far.
    """
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs")
        if logprobs and not _as_ids(logprobs["tokens"]):
            begin = positions.get(choice["index"], 0)
            offsets, end = text_offsets(logprobs["tokens"], choice["text"], begin, whole=not request.stream)
            logprobs["text_offset"] = offsets
            positions[choice["index"]] = end
    usage = answer.get("usage")
    if usage and request.echo and request.max_tokens == 0:  # the engine cannot but make one
        usage["completion_tokens"] = 0
        usage["total_tokens"] = usage["prompt_tokens"]


def text_offsets(tokens: Sequence[str], text: str, begin: int, *, whole: bool) -> tuple[list[int], int]:
    """Where each of `tokens` begins in a text that goes on with `text` at `begin`; and where they end.

    Text can lack a token (a special one) and have characters that no token has (�, of bytes that make none). Where it
    is not `whole`, it can come later than its tokens: held back while it may be the begin of a stop string.
    """
    offsets = []
    here = 0
    for token in tokens:
        found = text.find(token, here, here + len(token) + _SKIPPED)
        late = not whole and here + len(token) > len(text)
        begins = found if found >= 0 else here
        offsets.append(begin + begins)
        here = begins + len(token) if found >= 0 or late else here
    return offsets, begin + here


_SKIPPED = 3  # the most � that the bytes of one token leave


def _as_ids(tokens: Sequence[str]) -> bool:
    return bool(tokens) and tokens[0].startswith("token_id:")
