"""Clusters on this machine. Collected only by `make test-cluster`: it needs root, Ray, and a minute a test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, missing
from tests.cluster.ray_nodes import RayCluster

ASKED = "TEST_CLUSTER" in os.environ
collect_ignore_glob = [] if ASKED else ["test_*.py"]


def pytest_configure() -> None:
    """Refuses early, with what is missing, rather than in every test."""
    if not ASKED:
        return
    if why := missing():
        raise pytest.UsageError(f"tests/cluster: {why}")
    if importlib.util.find_spec("ray") is None:
        raise pytest.UsageError(
            "tests/cluster: Ray is absent from this Python; run `make test-cluster`, which installs it"
        )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(machines: Machines, tmp_path: Path) -> RayCluster:
    """An empty cluster: `start_head`, then `start_worker` as often as the test needs."""
    return RayCluster(machines, tmp_path)
