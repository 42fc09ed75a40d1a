"""Chats: the same finish reason streamed or not, and streams made from whole answers where vLLM's are wrong."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

TOKENS_RAN_OUT = "length"


def with_true_reasons(original: Any) -> Any:
    """vLLM's OpenAIServingChat, corrected: it reports `tool_calls` even if max_tokens cut the answer off."""

    class OpenAIServingChat(original):  # type: ignore[misc]
        async def chat_completion_stream_generator(
            self, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
        ) -> AsyncIterator[str]:
            cut: set[int] = set()
            events = super().chat_completion_stream_generator(request, _noted(result_generator, cut), *args, **kwargs)
            async for event in events:
                yield _with_reason(event, cut) if cut and '"finish_reason":"tool_calls"' in event else event

        async def chat_completion_full_generator(
            self, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
        ) -> Any:
            cut: set[int] = set()
            noted = _noted(result_generator, cut)
            answer = await super().chat_completion_full_generator(request, noted, *args, **kwargs)
            for choice in getattr(answer, "choices", ()):
                if choice.index in cut:
                    choice.finish_reason = TOKENS_RAN_OUT
            return answer

    return OpenAIServingChat


async def _noted(results: AsyncIterator[Any], cut: set[int]) -> AsyncIterator[Any]:
    """The engine's results. Adds the choices that max_tokens ended to `cut`."""
    async for result in results:
        cut.update(output.index for output in result.outputs if output.finish_reason == TOKENS_RAN_OUT)
        yield result


def _with_reason(event: str, cut: set[int]) -> str:
    data = json.loads(event.removeprefix("data: "))
    for choice in data["choices"]:
        if choice["index"] in cut and choice["finish_reason"]:
            choice["finish_reason"] = TOKENS_RAN_OUT
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def needs_whole(request: Any) -> bool:
    """Whether the stream must be made from the whole answer.

    vLLM's own stream cuts a required call's arguments at braces inside strings. A named call's spaces differ from those
    of the whole answer.
    """
    return (
        bool(request.tools)
        and request.tool_choice != "none"
        and ((request.n or 1) > 1 or request.tool_choice not in (None, "auto"))
    )


def events(answer: dict[str, Any], include_usage: bool) -> Iterator[str]:
    """A whole chat completion as the data of a stream's events."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        message = choice["message"]
        delta = {"role": message["role"], "content": message["content"] or ""}
        if message.get("reasoning"):
            delta["reasoning"] = message["reasoning"]
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        said = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        yield json.dumps({**head, "choices": [said]}, ensure_ascii=False)
        end = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield json.dumps({**head, "choices": [{**end, "stop_reason": choice["stop_reason"]}]}, ensure_ascii=False)
    if include_usage:
        usage = {name: value for name, value in answer["usage"].items() if value is not None}
        yield json.dumps({**head, "choices": [], "usage": usage}, ensure_ascii=False)
