"""Who runs, who waits, who makes room: engines on demand whose starts and ends a test scripts."""

import asyncio
import itertools
import json
import random
import time
from typing import Any

import httpx
import pytest

from server.diagnosis import Diagnosis
from server.gateway import demand as demand_module
from server.supervisor import State
from server.supervisor.states import Progress
from tests.server.gateway.inprocess import error_of
from tests.server.gateway.on_demand import Swapping, settle

BROKEN = Diagnosis("bad", "Broken shard", "model", "Shard 5 is short.", ("Fetch it again.",), "line", retry=False)
GPU = "GPU 0"


async def ready(here: Swapping, name: str) -> None:
    """Starts a model by a request for it."""
    asked = here.asking(name)
    await settle()
    here[name].up()
    assert (await asked).status_code == 200


async def reached(here: Swapping, name: str, state: State) -> None:
    while here[name].status.state is not state:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_the_first_request_starts_its_engine_and_is_answered_by_it() -> None:
    here = Swapping(a=GPU)
    asked = here.asking("a")
    await settle()
    assert here["a"].log == ["start"]
    assert not asked.done()
    here["a"].up()
    assert (await asked).json()["model"] == "a"
    assert (await here.ask(model="a")).status_code == 200, "and later ones wait for nothing"
    assert here["a"].log == ["start"]


async def test_an_unknown_model_starts_nothing() -> None:
    here = Swapping(a=GPU, b=GPU)
    assert (await here.ask(model="c")).status_code == 404
    assert [script.log for script in here.scripts.values()] == [[], []]


async def test_another_model_on_the_same_gpu_makes_room_and_is_stopped_first() -> None:
    here = Swapping(a=GPU, b=GPU)
    await ready(here, "a")
    asked = here.asking("b")
    await settle()
    assert here["a"].log == ["start", "retire: it makes room for b", "rest"]
    assert here["b"].log == [], "not before every process of a is gone"
    here["a"].gone()
    await settle()
    assert here["b"].log == ["start"]
    here["b"].up()
    assert (await asked).json()["model"] == "b"


async def test_models_on_other_gpus_stay() -> None:
    here = Swapping(a=GPU, b="GPU 1", wide="GPU 0,GPU 1", c="GPU 2")
    for name in ("a", "b", "c"):
        await ready(here, name)
    asked = here.asking("wide")
    await settle()
    assert [here[name].status.state for name in "abc"] == [State.DRAINING, State.DRAINING, State.READY]
    here["a"].gone()
    await settle()
    assert here["wide"].log == []
    here["b"].gone()
    await settle()
    here["wide"].up()
    assert (await asked).status_code == 200


async def test_answers_under_way_end_before_the_swap_and_new_ones_wait() -> None:
    here = Swapping(a=GPU, b=GPU)
    await ready(here, "a")
    slow = here.asking("a", fake={"tokens": 3, "delay": 0.05})
    await asyncio.sleep(0.02)
    other = here.asking("b")
    await settle()
    assert here["a"].log[1:] == ["retire: it makes room for b"]
    late = here.asking("a")
    assert (await slow).status_code == 200
    await settle()
    assert here["a"].log[2:] == ["rest"]
    assert not late.done()
    here["a"].gone()
    await settle()
    here["b"].up()
    assert (await other).status_code == 200
    await settle()
    assert here["b"].log[1:] == ["retire: it makes room for a", "rest"]
    here["b"].gone()
    await settle()
    here["a"].up()
    assert (await late).json()["model"] == "a"


async def test_answers_that_do_not_end_are_cut_off_at_the_drain_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Swapping(a=GPU, b=GPU, times={"drain_timeout": 0.1})
    await ready(here, "a")
    cut: list[str] = []
    here.demands["a"].break_off = cut.append
    endless = here.asking("a", fake={"tokens": 100, "delay": 0.05})
    await asyncio.sleep(0.02)
    other = here.asking("b")
    await asyncio.sleep(0.3)
    assert cut
    assert here["a"].log[-1] == "rest"
    for task in (endless, other):
        task.cancel()


async def test_a_model_in_use_stays_for_its_residence_however_requests_alternate() -> None:
    here = Swapping(a=GPU, b=GPU, times={"min_residence": 0.6})
    await ready(here, "a")
    began = time.monotonic()
    other = here.asking("b")
    while here["a"].status.state is State.READY:
        assert (await here.ask(model="a")).status_code == 200
        await asyncio.sleep(0.02)
    assert 0.5 < time.monotonic() - began < 5
    other.cancel()


async def test_a_model_out_of_use_need_not_stay_for_its_residence() -> None:
    here = Swapping(a=GPU, b=GPU, times={"min_residence": 60.0 * 6 / 100})
    await ready(here, "a")
    began = time.monotonic()
    other = here.asking("b")
    await reached(here, "a", State.DRAINING)
    assert 0.4 < time.monotonic() - began < 2.5, "a sixth of it, without a request"
    other.cancel()


async def test_who_has_waited_longest_is_next() -> None:
    here = Swapping(a=GPU, b=GPU, c=GPU)
    asked = [here.asking("a")]
    await settle()
    for name in ("c", "b", "c"):
        asked.append(here.asking(name))
        await settle()
    order = []
    for _ in range(3):
        name = next(name for name, script in here.scripts.items() if script.status.state is State.STARTING)
        order.append(name)
        here[name].up()
        await settle()
        await asyncio.sleep(0.05)
        if here[name].status.state is State.DRAINING:
            here[name].gone()
            await settle()
    assert order == ["a", "c", "b"]
    assert [(await one).status_code for one in asked] == [200] * 4


async def test_requests_for_one_model_keep_their_order() -> None:
    here = Swapping("--max-in-flight", "1", a=GPU)
    ended: list[int] = []

    async def ask(number: int) -> None:
        assert (await here.ask(model="a")).status_code == 200
        ended.append(number)

    asked = []
    for number in range(20):
        asked.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(0)
        if number == 15:
            await settle()
            here["a"].up()
    await asyncio.gather(*asked)
    assert ended == list(range(20))


async def test_the_queue_is_bounded_and_a_client_that_leaves_frees_its_place() -> None:
    here = Swapping("--queue-size", "2", a=GPU)
    waiting = [here.asking("a") for _ in range(2)]
    await settle()
    refused = await here.ask(model="a")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    waiting[0].cancel()
    await settle()
    third = here.asking("a")
    await settle()
    here["a"].up()
    assert [(await one).status_code for one in (waiting[1], third)] == [200, 200]
    assert here.demands["a"].waiting == 0


async def test_a_client_that_leaves_as_it_gets_its_place_does_not_hold_up_a_drain() -> None:
    here = Swapping("--max-in-flight", "1", a=GPU, b=GPU)
    await ready(here, "a")
    admission = here.demands["a"].admission
    first = here.asking("a", fake={"tokens": 2, "delay": 0.05})
    await asyncio.sleep(0.02)
    second = here.asking("a")
    await settle()
    other = here.asking("b")
    await settle()
    assert (here["a"].status.state, admission.waiting) == (State.DRAINING, 1)
    leave = admission.leave

    def leave_and_cancel() -> None:
        leave()
        second.cancel()

    admission.leave = leave_and_cancel  # type: ignore[method-assign]
    assert (await first).status_code == 200
    await settle()
    assert here["a"].log[-1] == "rest"
    here["a"].gone()
    await settle()
    here["b"].up()
    assert (await other).status_code == 200


async def test_a_start_that_nobody_waits_for_any_more_makes_room_at_once() -> None:
    here = Swapping(a=GPU, b=GPU, times={"min_residence": 1000})
    gone = here.asking("a")
    await settle()
    other = here.asking("b")
    await settle()
    assert here["a"].status.state is State.STARTING
    gone.cancel()
    await settle()
    assert here["a"].log[1:] == ["retire: it makes room for b", "rest"]
    here["a"].gone()
    await settle()
    here["b"].up()
    assert (await other).status_code == 200


async def test_a_failed_start_answers_all_who_wait_with_the_diagnosis_and_is_not_repeated_at_once() -> None:
    here = Swapping(a=GPU, b=GPU)
    asked = [here.asking("a") for _ in range(3)]
    await settle()
    here["a"].fail(30, BROKEN)
    for one in asked:
        answer = await one
        assert (answer.status_code, error_of(answer)["code"]) == (503, "start_failed")
        assert "Shard 5 is short. Fetch it again." in error_of(answer)["message"]
        assert 25 < int(answer.headers["retry-after"]) <= 30
    again = await here.ask(model="a")
    assert (again.status_code, error_of(again)["code"]) == (503, "start_failed")
    assert here["a"].log == ["start"]
    assert (await here.client.get("/health")).status_code == 503
    await ready(here, "b")


async def test_after_the_backoff_the_next_request_tries_again() -> None:
    here = Swapping(a=GPU)
    asked = here.asking("a")
    await settle()
    here["a"].fail(0.1)
    assert (await asked).status_code == 503
    await asyncio.sleep(0.15)
    assert (await here.client.get("/health")).status_code == 200, "it can be started"
    await ready(here, "a")
    assert here["a"].log == ["start", "start"]


async def test_an_engine_that_dies_while_it_drains_frees_its_place() -> None:
    here = Swapping(a=GPU, b=GPU)
    await ready(here, "a")
    slow = here.asking("a", fake={"tokens": 3, "delay": 0.1})
    await asyncio.sleep(0.02)
    other = here.asking("b")
    await settle()
    assert here["a"].status.state is State.DRAINING
    here["a"].gone()
    await settle()
    here["b"].up()
    assert (await other).status_code == 200
    await slow


async def test_requests_at_a_degraded_engine_wait_and_go_on_where_it_recovers() -> None:
    here = Swapping(a=GPU)
    await ready(here, "a")
    here["a"].enter(State.DEGRADED)
    asked = here.asking("a")
    await settle()
    assert not asked.done()
    here["a"].enter(State.READY)
    assert (await asked).status_code == 200


async def test_a_model_without_requests_is_stopped_at_its_idle_timeout_and_starts_again() -> None:
    here = Swapping(a=GPU, times={"idle_timeout": 0.15})
    await ready(here, "a")
    await asyncio.sleep(0.1)
    assert (await here.ask(model="a")).status_code == 200
    await asyncio.sleep(0.1)
    assert here["a"].status.state is State.READY, "counted from its last request"
    await asyncio.sleep(0.15)
    assert here["a"].log[1:] == ["retire: no request for 0.15 s", "rest"]
    here["a"].gone()
    await ready(here, "a")


async def test_the_end_refuses_who_waits_and_starts_nothing() -> None:
    here = Swapping(a=GPU, b=GPU)
    await ready(here, "a")
    asked = here.asking("b")
    await settle()
    for script in here.scripts.values():
        if script.status.state is not State.DRAINING:
            script.enter(State.DRAINING)
    here.swap.close()
    here["a"].occupied = False
    answer = await asked
    assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")
    assert error_of(await here.ask(model="b"))["code"] == "draining"
    assert (await here.client.get("/health")).status_code == 503
    assert here["b"].log == []


async def lines(here: Swapping, **body: Any) -> tuple[int, list[str]]:
    answer = await here.ask(stream=True, **body)
    return answer.status_code, [line for line in answer.text.split("\n\n") if line]


async def test_a_stream_is_told_why_it_waits_and_then_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "TELL_INTERVAL", 0.05)
    here = Swapping(a=GPU, b=GPU, times={"min_residence": 1.5})
    await ready(here, "a")
    asked = asyncio.create_task(lines(here, model="b"))
    await asyncio.sleep(0.12)
    await reached(here, "a", State.DRAINING)
    here["a"].gone()
    await settle()
    here["b"].enter(State.LOADING, progress=Progress("weights", 1, 4, "bytes"))
    await asyncio.sleep(0.1)
    here["b"].enter(State.WARMING)
    here["b"].enter(State.READY)
    status, events = await asked
    comments = [event for event in events if event.startswith(":")]
    assert status == 200
    assert any("a is in use and makes room in" in comment for comment in comments)
    assert ": b is being started: weights 25%" in comments
    assert events[-1] == "data: [DONE]"
    assert len([event for event in events if event.startswith("data: {")]) == 3


async def test_a_stream_whose_engine_cannot_be_started_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "TELL_INTERVAL", 0.02)
    here = Swapping(a=GPU)
    asked = asyncio.create_task(lines(here, model="a"))
    await asyncio.sleep(0.05)
    here["a"].fail(30, BROKEN)
    status, events = await asked
    assert status == 200
    assert events[0] == ": a is being started: starting"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "start_failed"
    metrics = here.gateway.metrics.render({}).decode()
    assert 'voltserve_requests_refused_total{code="start_failed"} 1.0' in metrics
    assert 'status="503"' in metrics


async def test_a_stream_that_waits_gets_the_engine_s_refusal_as_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "TELL_INTERVAL", 0.02)
    here = Swapping(a=GPU)
    here.engines[0].fake.start = type(here.engines[0].fake.start)(refusal=(400, "too long"))
    asked = asyncio.create_task(lines(here, model="a"))
    await asyncio.sleep(0.05)
    here["a"].up()
    status, events = await asked
    assert status == 200
    assert "too long" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]


async def test_a_stream_that_need_not_wait_long_has_its_own_status() -> None:
    here = Swapping(a=GPU)
    asked = asyncio.create_task(lines(here, model="a"))
    await settle()
    here["a"].fail(30)
    assert (await asked)[0] == 503


async def test_health_models_and_metrics_tell_what_waits() -> None:
    here = Swapping(a=GPU, b=GPU, times={"min_residence": 50})
    await ready(here, "a")
    asked = here.asking("b")
    await settle()

    async def get(path: str) -> httpx.Response:
        return await here.client.get(path)

    health = await get("/health")
    assert health.status_code == 200
    one, two = health.json()["engines"]
    assert (one["state"], one["on_demand"]) == ("ready", {"waiting": 0, "waits_for": "", "starts": 1})
    assert (two["state"], two["on_demand"]["waiting"]) == ("stopped", 1)
    assert two["on_demand"]["waits_for"].startswith("b waits: a is in use and makes room in ")
    models = (await get("/v1/models")).json()["data"]
    assert [(model["id"], model["state"]) for model in models] == [("b", "stopped"), ("a", "ready")]
    assert (await get("/v1/models/b")).json()["state"] == "stopped"
    text = (await get("/metrics")).text
    for line in (
        'voltserve_demand_starts_total{replica="a"} 1.0',
        'voltserve_demand_stops_total{reason="swap",replica="a"} 0.0',
        'voltserve_demand_waiting{replica="b"} 1.0',
        'voltserve_demand_wait_seconds_count{replica="a"} 1.0',
        "voltserve_requests_queued 1.0",
    ):
        assert line in text, text[:3000]
    asked.cancel()
    await settle()


async def test_health_is_200_while_nothing_runs() -> None:
    here = Swapping(a=GPU)
    answer = await here.client.get("/health")
    assert (answer.status_code, answer.json()["state"]) == (200, "stopped")
    assert [model["id"] for model in (await here.client.get("/v1/models")).json()["data"]] == ["a"]


async def drive(here: Swapping, name: str, chance: random.Random) -> None:
    """Plays one engine: starts take a moment, some fail, some die, stops take a moment."""
    script = here[name]
    while True:
        await asyncio.sleep(chance.uniform(0, 0.01))
        if not script.occupied:
            continue
        if script.status.state is State.STARTING:
            if chance.random() < 0.15:
                script.fail(0.01)
            else:
                script.up()
        elif script.status.state is State.DRAINING and script.log[-1] == "rest":
            script.gone()
        elif script.status.state is State.READY and chance.random() < 0.02:
            script.fail(0)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_no_place_is_held_twice_and_every_request_gets_an_answer(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    places = {"a": GPU, "b": GPU, "c": "GPU 1", "wide": "GPU 0,GPU 1"}
    here = Swapping(times={"min_residence": 0.03, "idle_timeout": 0.05}, **places)
    playing = [asyncio.create_task(drive(here, name, chance)) for name in places]
    demands = list(here.demands.values())
    answers: list[int] = []

    async def client() -> None:
        for _ in range(12):
            asked = here.asking(chance.choice(list(places)), stream=chance.random() < 0.3)
            if chance.random() < 0.2:  # it leaves
                await asyncio.sleep(chance.uniform(0, 0.03))
                asked.cancel()
                await asyncio.wait([asked])
            else:
                answers.append((await asked).status_code)
            held = [one for one in demands if one.engine.occupied]
            assert not any(one.options.collides(other.options) for one, other in itertools.combinations(held, 2)), [
                one.name for one in held
            ]

    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(10))), 60)
    for task in playing:
        task.cancel()
    assert set(answers) <= {200, 503}
    assert answers.count(200) > len(answers) / 2
    assert sum(one.waiting for one in demands) == 0
    assert sum(one.admission.running for one in demands) == 0
