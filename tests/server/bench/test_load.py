import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load import Closed, Open, arrivals, parse_levels
from server.errors import ConfigError


def test_levels_are_read_closed_first_and_once_each() -> None:
    assert parse_levels("1, 8,8", "0.5") == (Closed(1), Closed(8), Open(0.5))


@pytest.mark.parametrize(
    ("concurrency", "rate", "message"),
    [
        ("0", "", "--concurrency: expected whole numbers above 0 with commas between, got '0'"),
        ("1.5", "", "got '1.5'"),
        ("", "x", "--rate: expected numbers above 0"),
        ("", "inf", "got 'inf'"),
        ("", "nan", "got 'nan'"),
        ("", "", "no load given"),
    ],
)
def test_what_is_no_load_is_refused(concurrency: str, rate: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_levels(concurrency, rate)
    assert message in str(caught.value)


@given(st.integers(0, 2**32), st.floats(0.1, 100))
def test_arrivals_are_a_poisson_process(seed: int, rate: float) -> None:
    count = 2000
    times = arrivals(Open(rate), count, seed)
    assert times[0] == 0
    assert times == sorted(times)
    gaps = [late - early for early, late in pairwise(times)]
    # Mean and standard deviation of exponential gaps are both 1/rate; bounds of five standard errors and more.
    assert statistics.mean(gaps) * rate == pytest.approx(1, abs=0.12)
    assert statistics.stdev(gaps) * rate == pytest.approx(1, abs=0.25)
    # Kolmogorov-Smirnov: the largest distance from 1 - exp(-rate * gap) is below 1.95/sqrt(n) in all but 0.1 %.
    ordered = sorted(gaps)
    distance = max(abs(1 - math.exp(-rate * gap) - number / len(gaps)) for number, gap in enumerate(ordered))
    assert distance < 2.5 / math.sqrt(len(gaps))


def test_the_same_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    assert arrivals(Open(2), 50, 7) == arrivals(Open(2), 50, 7)
    assert arrivals(Open(2), 50, 7) != arrivals(Open(2), 50, 8)
