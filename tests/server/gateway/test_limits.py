import asyncio
from collections.abc import Callable

import pytest

from server.gateway.errors import APIError
from server.gateway.limits import FORGET_ABOVE, Admission, Client, ClientLimits
from tests.server.gateway.inprocess import InProcess, error_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal(act: Callable[[], object]) -> APIError:
    with pytest.raises(APIError) as caught:
        act()
    return caught.value


def ask(limits: ClientLimits, client: Client) -> None:
    with limits.counted(client):
        pass


def test_a_minute_s_requests_may_come_at_once_and_then_at_their_rate() -> None:
    clock = Clock()
    limits = ClientLimits(clock)
    client = Client("ann", requests_per_minute=6, max_concurrent=0)
    for _ in range(6):
        ask(limits, client)
    refused = refusal(lambda: ask(limits, client))
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert refused.headers["Retry-After"] == "10"
    clock.now += 9
    assert refusal(lambda: ask(limits, client)).headers["Retry-After"] == "1"
    clock.now += 1
    ask(limits, client)
    clock.now += 3600
    for _ in range(6):
        ask(limits, client)
    refusal(lambda: ask(limits, client))


def test_the_retry_after_told_is_enough() -> None:
    clock = Clock()
    limits = ClientLimits(clock)
    for rate in (1, 7, 60, 1000):
        client = Client(f"at {rate}", rate, 0)
        for _ in range(rate):
            ask(limits, client)
        clock.now += int(refusal(lambda client=client: ask(limits, client)).headers["Retry-After"])  # type: ignore[misc]
        ask(limits, client)


def test_requests_at_once_are_counted_until_their_end_even_a_bad_one() -> None:
    limits = ClientLimits(Clock())
    client = Client("ann", 0, max_concurrent=2)
    with limits.counted(client), limits.counted(client):
        assert refusal(lambda: ask(limits, client)).code == "too_many_concurrent_requests"
        ask(limits, Client("bob", 0, 2))
    with pytest.raises(KeyError), limits.counted(client):
        raise KeyError
    with limits.counted(client), limits.counted(client):
        pass


def test_a_limit_that_has_changed_holds_at_once() -> None:
    limits = ClientLimits(Clock())
    ask(limits, Client("ann", 1000, 0))
    ask(limits, Client("ann", 1, 0))
    refusal(lambda: ask(limits, Client("ann", 1, 0)))


def test_addresses_at_rest_are_forgotten() -> None:
    clock = Clock()
    limits = ClientLimits(clock)
    for index in range(FORGET_ABOVE):
        ask(limits, Client(f"old {index}", 60, 0))
    clock.now += 61
    for index in range(10):
        ask(limits, Client(f"new {index}", 60, 0))
    assert len(limits._uses) < 20


async def test_places_go_in_order_and_the_queue_has_a_bound() -> None:
    admission = Admission(running_limit=2, waiting_limit=3, timeout=60)
    order: list[int] = []

    async def request(number: int) -> None:
        await admission.enter()
        order.append(number)

    for _ in range(2):
        await admission.enter()
    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(request(number)))
        await asyncio.sleep(0)
    assert (admission.running, admission.waiting) == (2, 3)
    with pytest.raises(APIError) as caught:
        await admission.enter()
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert caught.value.headers["Retry-After"]
    for _ in range(3):
        admission.leave()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    assert (admission.running, admission.waiting) == (2, 0)


async def test_who_waits_too_long_is_told_so_and_leaves_the_queue() -> None:
    admission = Admission(1, 3, timeout=0.02)
    await admission.enter()
    with pytest.raises(APIError, match=r"0\.02 s \(--queue-timeout\)") as caught:
        await admission.enter()
    assert caught.value.code == "queue_timeout"
    admission.leave()
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("had_its_turn", [False, True])
async def test_who_goes_away_while_waiting_takes_no_place(had_its_turn: bool) -> None:
    admission = Admission(1, 3, timeout=60)
    await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await asyncio.sleep(0)
    if had_its_turn:
        admission.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not had_its_turn:
        admission.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_full_gateway_queues_then_refuses_and_ends_empty() -> None:
    here = InProcess("--max-in-flight", "2", "--queue-size", "3")
    replies = await asyncio.gather(*(here.ask(fake={"tokens": 3, "delay": 0.02}) for _ in range(8)))
    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [503] * 3
    refused = [reply for reply in replies if reply.status_code == 503]
    assert {error_of(reply)["code"] for reply in refused} == {"queue_full"}
    assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
    assert (here.pool.running, here.pool.waiting, here.gateway.in_flight.count) == (0, 0, 0)
    metrics = (await here.client.get("/metrics")).text
    assert 'voltserve_requests_refused_total{code="queue_full"} 3.0' in metrics
    assert "voltserve_requests_queued 0.0" in metrics


async def test_without_keys_the_limits_are_those_of_each_address() -> None:
    here = InProcess("--requests-per-minute", "2")
    other = here.connect("192.0.2.2")
    codes = [(await here.ask()).status_code for _ in range(3)] + [(await here.ask(client=other)).status_code]
    assert codes == [200, 200, 429, 200]
