"""Text completions: offsets that fit the text, and no token counted if none was requested."""

from collections.abc import Sequence
from typing import Any


def correct(answer: dict[str, Any], request: Any, positions: dict[int, int]) -> None:
    """Corrects a completion, whole or an event of a stream, in place.

    Args:
        answer: the JSON object.
        request: vLLM's CompletionRequest.
        positions: per choice, the number of characters of its text so far.
    """
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs")
        if logprobs and not _as_ids(logprobs["tokens"]):
            begin = positions.get(choice["index"], 0)
            offsets, end = text_offsets(logprobs["tokens"], choice["text"], begin, whole=not request.stream)
            logprobs["text_offset"] = offsets
            positions[choice["index"]] = end
    usage = answer.get("usage")
    if usage and request.echo and request.max_tokens == 0:  # the engine always generates one
        usage["completion_tokens"] = 0
        usage["total_tokens"] = usage["prompt_tokens"]


def text_offsets(tokens: Sequence[str], text: str, begin: int, *, whole: bool) -> tuple[list[int], int]:
    """Where each of `tokens` begins, and where the last ends, if `text` continues the whole text at `begin`.

    The text can lack special tokens, and can have characters of no token (� for invalid bytes). If it is not `whole`,
    it can arrive later than its tokens: vLLM holds back text that may begin a stop string.
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


_SKIPPED = 3  # the most � for one token's bytes


def _as_ids(tokens: Sequence[str]) -> bool:
    return bool(tokens) and tokens[0].startswith("token_id:")
