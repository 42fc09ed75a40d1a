"""One request harms nobody else: extremes of every field at the real engine, while other clients' streams run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.e2e.conftest import Service
from tests.e2e.extremes import alone, pairs, spread
from tests.e2e.fields import FIELDS
from tests.e2e.harm import Found, check

SEED = 20261201
PAIRS = 100  # in `make test`
LONG_S = 1500.0  # in `make test-long`


def told(found: Found) -> str:
    return "\n".join(str(fault) for fault in found.faults[:20])


@pytest.mark.e2e
def test_no_extreme_and_no_pair_of_a_sample_harms_anybody(service: Service) -> None:
    extremes = [*spread(SEED), *itertools.islice(pairs(SEED), PAIRS)]
    found = check(service, extremes, seconds=400)
    print(found.answered, f"{found.witnessed} streams", found.slowest)
    assert not found.faults, told(found)
    assert found.answered.total() == len(extremes)
    assert found.witnessed >= 3


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 1200)
def test_no_extreme_on_any_route_and_no_pair_harms_anybody(service: Service) -> None:
    found = check(service, itertools.chain(alone(), pairs(SEED + 1)), seconds=LONG_S)
    print(found.answered, f"{found.witnessed} streams", found.slowest)
    assert not found.faults, told(found)
    assert found.answered.total() > len(list(alone()))


def test_every_field_has_its_extremes_and_each_is_sent_once() -> None:
    sent = list(alone())
    assert {(one.route, *one.names) for one in sent} == {(route, name) for route in FIELDS for name in FIELDS[route]}
    assert (
        Counter((one.route, one.body) for one in sent).most_common(1)[0][1] <= 2
    )  # where an ordinary value is at a bound
    assert {one.expected for one in sent} == {"taken", "refused", "odd"}
    assert {one.names for one in spread(SEED)} == {one.names for one in sent}
