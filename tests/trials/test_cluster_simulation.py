"""The queueing simulation beside what theory says of simple cases."""

import statistics

import pytest

from trials.cluster_simulation import Costs, Replica, Simulation, gateway_limit

FREE = Costs(0.0, 0.0)


def test_replicas_with_every_place_taken_do_what_their_steps_allow() -> None:
    replica = Replica(slots=4, step=0.02, tokens=64)
    for count in (1, 3):
        seen = Simulation(replica, count, FREE, 50.0, clients=12 * count).run()
        assert seen.tokens / seen.seconds == pytest.approx(count * 200.0, rel=0.01)


def test_a_gateway_that_is_too_slow_sets_the_pace() -> None:
    seen = Simulation(Replica(4, 0.02, 64), 3, Costs(0.0, 0.01), 50.0, clients=12).run()
    # Of the 600 that the replicas could; counted when made, so a queue that grows counts, too.
    assert seen.tokens / seen.seconds == pytest.approx(100.0, rel=0.1)
    assert seen.busy / seen.seconds == pytest.approx(1.0, rel=0.1)


def test_waiting_in_a_queue_of_one_server_is_the_formula_s() -> None:
    """With one token per answer, free slots and no waiting for steps, the gateway is an M/D/1 queue."""
    cost, rate = 0.01, 60.0
    seen = Simulation(Replica(10**6, 1e-3, 1), 1, Costs(0.0, cost), 400.0, rate=rate).run()
    busy = rate * cost
    wait = busy * cost / (2 * (1 - busy))  # Pollaczek-Khinchine, service of one length
    # A request also waits half a step for its token. Tokens of one step are served in turn.
    assert statistics.mean(seen.first) == pytest.approx(cost + wait + 0.5e-3, rel=0.08)


def test_the_limit_is_where_the_core_is_busy_all_the_time() -> None:
    limit = gateway_limit(Costs(request=256e-6, token=99e-6))
    assert limit["cpu_us_a_token_requests_included"] == 100.0
    assert limit["machines_with_every_place_taken"] == int(1 / (140 * 100e-6))
