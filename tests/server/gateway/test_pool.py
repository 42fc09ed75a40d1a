import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.gateway.exchange import Answer, EngineGoneError
from server.supervisor import State
from tests.server.gateway.inprocess import Answered, Engine, InProcess, error_of


def several(*flags: str) -> InProcess:
    """Model a on two engines, model b (also called c) on one."""
    engines = (Engine("a-0", ("a",)), Engine("a-1", ("a",)), Engine("b", ("b", "c")))
    return InProcess(*flags, engines=engines)


def finished(here: InProcess) -> list[int]:
    return [engine.fake.stats["finished"] for engine in here.engines]


async def test_requests_go_to_an_engine_that_serves_their_model() -> None:
    here = several()
    for model in ("b", "c", "a"):
        assert (await here.ask(model=model)).json()["model"] == model
    assert finished(here) == [1, 0, 2]


async def test_the_least_busy_engine_is_taken() -> None:
    here = several()
    await asyncio.gather(*(here.ask(model="a", fake={"tokens": 3, "delay": 0.02}) for _ in range(8)))
    assert finished(here) == [4, 4, 0]


@pytest.mark.parametrize("state", [State.DEGRADED, State.FAILED, State.LOADING])
async def test_an_engine_that_is_not_ready_leaves_and_returns(state: State) -> None:
    here = several()
    here.engines[0].enter(state)
    for _ in range(3):
        assert (await here.ask(model="a")).status_code == 200
    assert finished(here) == [0, 3, 0]
    here.engines[0].enter(State.READY)
    await here.ask(model="a")
    assert finished(here) == [1, 3, 0]


async def test_a_model_without_a_ready_engine_is_a_503_and_the_others_go_on() -> None:
    here = several()
    for engine in here.engines[:2]:
        engine.enter(State.FAILED)
    refused = await here.ask(model="a")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_not_ready")
    assert (await here.ask(model="b")).status_code == 200


async def test_unknown_and_missing_models_are_refused_with_the_names_served() -> None:
    here = several()
    unknown = await here.ask(model="x" * 5000)
    assert (unknown.status_code, error_of(unknown)["code"], error_of(unknown)["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert error_of(unknown)["message"].endswith("served: a, b, c")
    malformed: tuple[Any, ...] = (None, 5, ["a"], {})
    for model in malformed:
        assert (await here.ask(model=model)).status_code in {400, 404}
    assert finished(here) == [0, 0, 0]


async def test_models_are_listed_once_each_while_they_can_be_used() -> None:
    here = several()

    async def listed() -> list[str]:
        return [model["id"] for model in (await here.client.get("/v1/models")).json()["data"]]

    assert sorted(await listed()) == ["a", "b", "c"]
    here.engines[2].enter(State.FAILED)
    assert await listed() == ["a"]
    assert (await here.client.get("/v1/models/a")).status_code == 200
    assert (await here.client.get("/v1/models/b")).status_code == 404


async def test_health_is_200_while_every_model_has_a_ready_engine() -> None:
    here = several()

    async def health() -> tuple[int, str, list[str]]:
        reply = await here.client.get("/health")
        body = reply.json()
        return reply.status_code, body["state"], [one["state"] for one in body["engines"]]

    assert await health() == (200, "ready", ["ready"] * 3)
    here.engines[0].enter(State.FAILED)
    assert await health() == (200, "ready", ["failed", "ready", "ready"])
    here.engines[1].enter(State.LOADING)
    assert await health() == (503, "failed", ["failed", "loading", "ready"])


async def test_metrics_tell_the_engines_apart() -> None:
    text = (await several().client.get("/metrics")).text
    for name in ("a-0", "a-1", "b"):
        assert f'vllm:num_requests_running{{replica="{name}",engine="0"}} 0' in text
    assert text.count("# TYPE vllm:num_requests_running ") == 1


async def test_who_waits_for_an_engine_that_fails_goes_to_another() -> None:
    here = several("--max-in-flight", "1")
    slow = {"tokens": 3, "delay": 0.05}
    running = [asyncio.create_task(here.ask(model="a", fake=slow)) for _ in range(4)]
    while here.pool.waiting < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    here.engines[0].enter(State.FAILED)
    assert [reply.status_code for reply in await asyncio.gather(*running)] == [200] * 4
    assert finished(here) == [1, 3, 0]
    assert (here.pool.running, here.pool.waiting) == (0, 0)


async def kept_by_each(here: InProcess) -> list[str]:
    """The id of a response at each of the engines of model a."""
    ids = []
    for engine, other in (here.engines[:2], here.engines[1::-1]):
        other.enter(State.FAILED)
        ids.append((await here.client.post("/v1/responses", json={"model": "a", "input": "Hi"})).json()["id"])
        other.enter(State.READY)
        assert engine.fake.responses == {ids[-1]}
    return ids


async def test_a_response_is_found_at_the_engine_that_keeps_it() -> None:
    here = several()
    for response_id in await kept_by_each(here):
        got = await here.client.get(f"/v1/responses/{response_id}")
        assert (got.status_code, got.json()["id"]) == (200, response_id)
        cancelled = await here.client.post(f"/v1/responses/{response_id}/cancel")
        assert (cancelled.status_code, cancelled.json()["method"]) == (200, "POST")


async def test_a_response_is_continued_where_the_one_before_it_is_kept() -> None:
    here = several()
    for response_id in await kept_by_each(here):
        for _ in range(4):
            body = {"model": "a", "input": "And?", "previous_response_id": response_id}
            assert (await here.client.post("/v1/responses", json=body)).status_code == 200


@pytest.mark.parametrize("response_id", ["resp_none", "..", "a/b", "x" * 3000])
async def test_a_response_that_nobody_keeps_is_a_404_that_says_why(response_id: str) -> None:
    here = several()
    body = {"model": "a", "input": "And?", "previous_response_id": response_id}
    reply = await here.client.post("/v1/responses", json=body)
    assert (reply.status_code, error_of(reply)["code"]) == (404, "response_not_found")
    assert "VLLM_ENABLE_RESPONSES_API_STORE=1" in error_of(reply)["message"]
    assert len(reply.content) < 500


async def test_a_response_whose_engine_failed_is_not_looked_for_elsewhere() -> None:
    here = several()
    first, _ = await kept_by_each(here)
    here.engines[0].enter(State.FAILED)
    reply = await here.client.get(f"/v1/responses/{first}")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        (b'data: {"error": {"message": "x", "code": 400}}\n\ndata: [DONE]\n\n', 400),
        (b'data: {"error": {"message": "x", "code": 503}}\n\n', 503),
        (b'data: {"error": {"message": "x", "code": "odd"}}\n\n', 500),
        (b'data: {"error": "x"}\n\n', 500),
        (b'data: {"text": "data: {\\"error\\": 1}"}\n\ndata: [DONE]\n\n', 200),  # what a model wrote
    ],
)
@pytest.mark.parametrize("step", [1, 7, 20, 1000])
async def test_an_error_event_is_seen_however_a_stream_is_cut(events: bytes, outcome: int, step: int) -> None:
    stream = b'data: {"a": 1}\n\n' + events
    chunks = [stream[at : at + step] for at in range(0, len(stream), step)]
    here = InProcess(engines=(streaming(Engine(), chunks),))
    reply = await here.ask(stream=True)
    assert (reply.status_code, reply.content) == (200, stream)
    if step == 1000:  # the code of an event in pieces may arrive too late
        assert counted(here) == [str(outcome)]
    else:
        assert (counted(here) == ["200"]) is (outcome == 200)


def streaming(engine: Engine, chunks: list[bytes]) -> Engine:
    """An engine that answers with a stream of these chunks."""

    async def parts() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    @contextlib.asynccontextmanager
    async def exchange(*_: object) -> AsyncIterator[Answer]:
        yield Answered(200, [(b"content-type", b"text/event-stream; charset=utf-8")], parts)

    engine.exchange = exchange
    return engine


def counted(here: InProcess) -> list[str]:
    """The statuses of the requests so far."""
    samples = [one for family in here.gateway.metrics.requests.collect() for one in family.samples]
    return [one.labels["status"] for one in samples if one.name.endswith("_total") and one.value]


def breaking(engine: Engine, *, chunks: tuple[bytes, ...] = ()) -> Engine:
    """An engine whose every answer ends after these chunks, as if its machine had lost power."""

    async def parts() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        raise EngineGoneError("its machine is gone")

    @contextlib.asynccontextmanager
    async def exchange(*_: object) -> AsyncIterator[Answer]:
        engine.fake.stats["streams"] += 1
        if not chunks:
            raise EngineGoneError("its machine is gone")
        yield Answered(200, [(b"content-type", b"text/event-stream")], parts)

    engine.exchange = exchange
    return engine


async def test_a_request_whose_engine_goes_before_its_answer_is_answered_by_another() -> None:
    dead = breaking(Engine("a-0", ("a",)))
    here = InProcess(engines=(dead, Engine("a-1", ("a",))))
    for stream in (False, True):
        assert (await here.ask(model="a", stream=stream)).status_code == 200
    assert dead.fake.stats["streams"] == 2, "it was asked first"
    assert finished(here) == [0, 2]
    assert 'voltserve_requests_refused_total{code="engine_unavailable"}' not in here.gateway.metrics.render({}).decode()


async def test_a_response_that_has_begun_is_not_begun_again() -> None:
    here = InProcess(engines=(breaking(Engine("a-0", ("a",)), chunks=(b"data: 1\n\n",)), Engine("a-1", ("a",))))
    answer = await here.ask(model="a", stream=True)
    assert answer.status_code == 200
    first, second = answer.text.strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(second.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert finished(here) == [0, 0]


async def test_a_request_that_no_engine_survives_is_tried_three_times() -> None:
    engines = tuple(breaking(Engine(f"a-{index}", ("a",))) for index in range(5))
    here = InProcess(engines=engines)
    answer = await here.ask(model="a")
    assert (answer.status_code, error_of(answer)["code"]) == (502, "engine_unavailable")
    assert [engine.fake.stats["streams"] for engine in engines] == [1, 1, 1, 0, 0]


async def test_the_second_attempt_is_at_another_machine_where_there_is_one() -> None:
    nodes = ("one", "one", "two")
    engines = [breaking(Engine(f"a-{index}", ("a",), node=node)) for index, node in enumerate(nodes[:2])]
    here = InProcess(engines=(*engines, Engine("a-2", ("a",), node="two")))
    assert (await here.ask(model="a")).status_code == 200
    assert [engine.fake.stats["streams"] for engine in engines] == [1, 0]
