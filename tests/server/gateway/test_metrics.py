import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.gateway.metrics import Metrics, joined, without_families
from server.supervisor import Progress, State, Status
from tests.server.conftest import Served


def status(state: State, progress: Progress | None = None, restarts: int = 0) -> Status:
    now = time.monotonic()
    return Status(state, "for a test", since=now, started_at=now, progress=progress, restarts=restarts)


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels; fails on a second one of the same."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


@pytest.mark.parametrize("state", list(State))
def test_exactly_one_state_is_1(state: State) -> None:
    metrics = Metrics()
    observe = metrics.observer()
    observe(status(State.STARTING))
    observe(status(state))
    found = values(metrics.render({}).decode())
    assert {key[1][0][1]: value for key, value in found.items() if key[0] == "voltserve_state"} == {
        one.value: float(one is state) for one in State
    }


@pytest.mark.parametrize(
    ("state", "progress", "expected"),
    [
        (State.STARTING, None, 0.0),
        (State.LOADING, Progress("weights", 25, 100, "bytes"), 0.25),
        (State.LOADING, Progress("warmup"), 1.0),
        (State.READY, None, 1.0),
        (State.FAILED, None, 0.0),
    ],
)
def test_load_progress_grows_from_0_to_1(state: State, progress: Progress | None, expected: float) -> None:
    metrics = Metrics()
    metrics.observer()(status(state, progress))
    assert values(metrics.render({}).decode())["voltserve_load_progress_ratio", ()] == expected


def test_restarts_are_counted_once_each() -> None:
    metrics = Metrics()
    observe = metrics.observer()
    for restarts in (0, 1, 1, 2, 2):
        observe(status(State.STARTING, restarts=restarts))
    assert values(metrics.render({}).decode())["voltserve_engine_restarts_total", ()] == 2


def test_a_family_that_is_ours_or_comes_twice_is_left_out() -> None:
    block = "# HELP a_total x\n# TYPE a_total counter\na_total 1.0\n"
    other = "# HELP b x\n# TYPE b gauge\nb 1.0\n"
    assert without_families(block + other, {"a", "a_total"}) == other
    assert without_families(block + other + block, set()) == block + other
    assert without_families("\n# EOF\n" + other, set()) == other


def test_several_engines_are_told_apart_in_one_text() -> None:
    one = '# HELP a x\n# TYPE a gauge\na 1.0\n# HELP b y\n# TYPE b counter\nb_total{l="v, w"} 2.0\n'
    two = "# HELP a x\n# TYPE a gauge\na 3.0\n# HELP c z\n# TYPE c gauge\nc 4.0\n"
    assert joined({"x-0": one, "x-1": two}) == (
        '# HELP a x\n# TYPE a gauge\na{replica="x-0"} 1.0\na{replica="x-1"} 3.0\n'
        '# HELP b y\n# TYPE b counter\nb_total{replica="x-0",l="v, w"} 2.0\n'
        '# HELP c z\n# TYPE c gauge\nc{replica="x-1"} 4.0\n'
    )


def test_each_of_several_engines_has_a_state_of_its_own() -> None:
    metrics = Metrics(several=True)
    for name, state in (("x-0", State.READY), ("x-1", State.FAILED)):
        metrics.observer(name)(status(state, restarts=len(state.value)))
    found = values(metrics.render({}).decode())
    assert found["voltserve_state", (("replica", "x-0"), ("state", "ready"))] == 1
    assert found["voltserve_state", (("replica", "x-1"), ("state", "ready"))] == 0
    assert found["voltserve_state", (("replica", "x-1"), ("state", "failed"))] == 1
    assert found["voltserve_engine_restarts_total", (("replica", "x-1"),)] == 6


def test_a_scrape_holds_both_sides_and_no_series_twice(served: Served) -> None:
    served.post()
    response = httpx.get(f"{served.url}/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = values(response.text)
    assert found["vllm:num_requests_running", (("engine", "0"),)] == 0
    assert found["voltserve_requests_in_flight", ()] == 0
    labels = (("method", "POST"), ("route", "/v1/completions"), ("status", "200"))
    assert found["voltserve_requests_total", labels] == 1
    assert found["voltserve_time_to_first_byte_seconds_count", (("route", "/v1/completions"),)] == 1
    assert ("voltserve_requests_total", (("route", "fake"),)) not in found
    declared = [line for line in response.text.splitlines() if line.startswith("# TYPE ")]
    assert len(declared) == len(set(declared))


def test_paths_of_clients_make_no_series(served: Served) -> None:
    for path in ("/secret/1", "/secret/2", "/v1/responses/abc"):
        httpx.get(f"{served.url}{path}")
    httpx.request("BREW", f"{served.url}/coffee")
    text = httpx.get(f"{served.url}/metrics").text
    assert "secret" not in text
    assert "abc" not in text
    assert "BREW" not in text
    assert 'route="/v1/responses/{response_id}"' in text
