import asyncio

import pytest

from server.supervisor import State
from tests.server.gateway.inprocess import Engine, InProcess, error_of


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
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert error_of(unknown)["message"].endswith("served: a, b, c")
    for model in (None, 5, ["a"], {}):
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
