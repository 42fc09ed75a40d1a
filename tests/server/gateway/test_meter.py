"""Counting tokens in answers of the forms that vLLM 0.28.0 gives (tests/e2e/test_shared_use.py holds it to them)."""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from server.gateway.meter import CHAT, COMPLETIONS, OVERLAP, RESPONSES, Meter
from server.usage import Counts
from tests.server.gateway.inprocess import Answered

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
TRICKY = 'a ,"usage":{"prompt_tokens":9} "choices":[] b'  # a model may write anything


def usage(prompt: int, completion: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion},'
        '"prompt_tokens_details":null}'
    )


def completion_event(index: int, used: str, text: str = "字") -> str:
    choice = f'{{"index":{index},"text":{json.dumps(text, ensure_ascii=False)},"logprobs":null,"finish_reason":null}}'
    used = f',"usage":{used}' if used else ""
    return f'data: {{"id":"cmpl-1","object":"text_completion","model":"m","choices":[{choice}]{used}}}\n\n'


def chat_event(index: int, used: str, text: str = "字") -> str:
    used = f',"usage":{used}' if used else ""
    delta = json.dumps({"content": text}, ensure_ascii=False)
    return f'data: {{"id":"c-1","choices":[{{"index":{index},"delta":{delta},"finish_reason":null}}]{used}}}\n\n'


def last_event(prompt: int, completion: int) -> str:
    return f'data: {{"id":"c-1","choices":[],"usage":{usage(prompt, completion)}}}\n\n'


def answer(parts: Iterable[bytes], headers: list[tuple[bytes, bytes]]) -> Answered:
    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return Answered(200, headers, chunks)


async def passed(meter: Meter, parts: Iterable[bytes], headers: list[tuple[bytes, bytes]] = EVENTS) -> str:
    return b"".join([chunk async for chunk in meter.chunks(answer(parts, headers))]).decode()


def metered(path: str = COMPLETIONS, **request: Any) -> Meter:
    return Meter(path, {"model": "m", **request}, "m")


DONE = "data: [DONE]\n\n"
EACH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, EACH, {"include_usage": False, "continuous_usage_stats": True}]
)
async def test_a_stream_is_what_the_client_asked_for_and_is_counted_however_it_is_cut(
    path: str, size: int, options: dict[str, bool] | None
) -> None:
    of = completion_event if path == COMPLETIONS else chat_event
    asked_each, asked_end = options == EACH, options is not None and options["include_usage"]
    sent = [of(0, usage(5, n), text) for n, text in enumerate(("", "Hi", TRICKY, "🙂"))] + [last_event(5, 3), DONE]
    wanted = [of(0, usage(5, n) if asked_each else "", text) for n, text in enumerate(("", "Hi", TRICKY, "🙂"))] + [
        *([last_event(5, 3)] if asked_end else []),
        DONE,
    ]
    meter = metered(path, stream=True, stream_options=options)
    bytes_sent = "".join(sent).encode()
    parts = [bytes_sent[at : at + size] for at in range(0, len(bytes_sent), size)]
    assert await passed(meter, parts) == "".join(wanted)
    assert meter.counts() == Counts(1, 0, 5, 3)


async def test_a_client_that_leaves_is_counted_with_all_that_was_told() -> None:
    meter = metered(stream=True, n=2, prompt=["a", "b"])
    sent = [completion_event(index, usage(4 + index // 2, 10 + index)).encode() for index in range(4)]
    stream = meter.chunks(answer([*sent, completion_event(0, usage(4, 11))[:-9].encode()], EVENTS))
    for _ in range(4):
        assert await anext(stream)
    assert meter.counts() == Counts(1, 0, 4 + 5, 10 + 11 + 12 + 13)


async def test_half_an_event_is_kept_back_until_the_rest_comes() -> None:
    event = completion_event(0, usage(1, 1)).encode()
    meter = metered(stream=True)
    chunks = [chunk async for chunk in meter.chunks(answer([event[:40], event[40:] + b"data: [DO"], EVENTS))]
    assert chunks == [completion_event(0, "").encode(), b"data: [DO"]


async def test_a_second_try_at_another_engine_starts_from_nothing() -> None:
    meter = metered(stream=True)
    assert await passed(meter, [completion_event(0, usage(5, 9)).encode(), b"data: {half"])
    assert await passed(meter, [completion_event(0, usage(5, 1)).encode()]) == completion_event(0, "")
    assert meter.counts() == Counts(1, 0, 5, 1)


@pytest.mark.parametrize(
    ("request_body", "asks"),
    [
        ({"stream": True}, EACH),
        ({"stream": "true"}, EACH),
        ({"stream": True, "stream_options": None}, EACH),
        ({"stream": True, "stream_options": {"include_usage": False, "x": 1}}, {**EACH, "x": 1}),
        ({"stream": True, "stream_options": {"include_usage": "false"}}, EACH),
        ({"stream": True, "stream_options": EACH}, EACH),
        ({"stream": True, "stream_options": {"include_usage": "maybe"}}, {"include_usage": "maybe"}),
        ({"stream": True, "stream_options": 5}, 5),
        ({"stream": False}, None),
        ({}, None),
    ],
)
def test_every_stream_is_made_to_tell(request_body: dict[str, Any], asks: object) -> None:
    body = json.dumps({"prompt": "é", **request_body}).encode()
    for spaced in (body, b" \r\n\t" + body):
        meter = metered(**request_body)
        assert meter.counts() is None
        sent = json.loads(meter.asking(spaced))
        assert sent.pop("stream_options", None) == asks
        assert sent == {name: value for name, value in json.loads(body).items() if name != "stream_options"}


def test_responses_and_embeddings_are_sent_as_they_are() -> None:
    for path in (RESPONSES, "/v1/embeddings"):
        assert metered(path, stream=True).asking(b'{"stream":true}') == b'{"stream":true}'


@pytest.mark.parametrize("size", [1, 100, OVERLAP, 10**6])
async def test_an_answer_in_one_piece_passes_as_it_is_and_is_counted(size: int) -> None:
    body = json.dumps({"id": "x", "choices": [{"index": 0, "text": TRICKY}], "usage": json.loads(usage(7, 9))})
    body = body[:-1] + ', "prompt_logprobs": [' + ",".join("null" for _ in range(5000)) + "]}"
    meter = metered()
    parts = [body[at : at + size].encode() for at in range(0, len(body), size)]
    assert await passed(meter, parts, JSON) == body
    assert meter.counts() == Counts(1, 0, 7, 9)


async def test_embeddings_have_prompts_only() -> None:
    meter = metered("/v1/embeddings")
    await passed(meter, [b'{"data":[[0.5]],"usage":{"prompt_tokens":6,"total_tokens":6,"completion_tokens":0}}'], JSON)
    assert meter.counts() == Counts(1, 0, 6, 0)


RESPONSE = {
    "id": "resp_1",
    # The client's own, shown again: it must not be able to say what its tokens were.
    "tools": [{"type": "function", "parameters": {"x": 1, "usage": {"input_tokens": 0, "output_tokens": 0}}}],
    "usage": {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 2, "a": []}, "output_tokens": 13},
}


@pytest.mark.parametrize("size", [3, 10**6])
async def test_responses_are_counted(size: int) -> None:
    body = json.dumps(RESPONSE, sort_keys=True).encode()  # `usage` is last; with the tools before it
    shuffled = json.dumps(dict(reversed(RESPONSE.items()))).encode()
    for text in (body, shuffled):
        meter = metered(RESPONSES)
        assert await passed(meter, [text[at : at + size] for at in range(0, len(text), size)], JSON) == text.decode()
        assert meter.counts() == Counts(1, 0, 11, 13)


@pytest.mark.parametrize("size", [5, 10**6])
async def test_streamed_responses_are_counted_and_broken_ones_by_their_pieces(size: int) -> None:
    begun = b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"delta":"event: response.completed"}\n\n'
    end = b'event: response.completed\ndata: {"response":' + json.dumps(RESPONSE).encode() + b"}\n\n"
    whole = begun + delta * 4 + end
    meter = metered(RESPONSES, stream=True)
    assert await passed(meter, [whole[at : at + size] for at in range(0, len(whole), size)]) == whole.decode()
    assert meter.counts() == Counts(1, 0, 11, 13)
    broken = metered(RESPONSES, stream=True)
    await passed(broken, [begun + delta * 4])
    assert broken.counts() == Counts(1, 1, 0, 4)


async def test_what_says_nothing_is_not_counted() -> None:
    for path, body in ((COMPLETIONS, b'{"id":1}'), (RESPONSES, b'{"usage":null}'), (RESPONSES, b"nonsense")):
        meter = metered(path)
        assert not meter.began
        await passed(meter, [body], JSON)
        assert meter.counts() is None
        assert meter.began
