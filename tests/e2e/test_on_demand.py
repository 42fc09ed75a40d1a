"""Two real engines on the CPU, swapped on demand (tests/e2e/on_demand.py)."""

from pathlib import Path

import pytest

from tests.e2e.on_demand import CLIENTS, REQUESTS, run


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_alternating_clients_lose_nothing_and_cause_few_swaps(tmp_path: Path) -> None:
    found = run(tmp_path)
    print(found)
    assert found.lost == []
    assert sum(found.answered.values()) == REQUESTS
    assert found.order_kept
    # At best each swap serves one request of every client; half of that is still no thrash.
    assert found.swaps <= 2 * REQUESTS / CLIENTS
    killed = found.killed_in_a_swap
    assert (killed["status"], killed["code"], killed["processes_after"]) == (503, "start_failed", 0)
    assert killed["status_of_the_next_attempt"] == 200
    assert found.processes_left == 0
