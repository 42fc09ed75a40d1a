"""What the table of two V100s takes from measurements."""

import pytest

from perfmodel.dense_table import OLDER_HOST, graph_host_ms


def measured(*waits: float) -> dict[str, object]:
    return {"beside": [{"streams": 2**i, "host_ms": wait} for i, wait in enumerate(waits)]}


@pytest.mark.parametrize("waits", [(0.05, 0.25, 0.09, -0.15), (0.25,), (-0.1, 0.25)])
def test_the_longest_wait_for_the_host_counts_for_all_streams(waits: tuple[float, ...]) -> None:
    assert graph_host_ms(measured(*waits)) == OLDER_HOST * 0.25


@pytest.mark.parametrize("waits", [(), (0.0,), (-0.1, -0.2)])
def test_measurements_without_a_wait_are_refused(waits: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="--graphs: expected times that graphs wait for the host, got"):
        graph_host_ms(measured(*waits))
