from collections.abc import Iterator

import pytest

from tests.server.conftest import Served, make_model, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One ready server for a module's tests."""
    model = make_model(tmp_path_factory.mktemp("served") / "model")
    with serving(model, "--max-body-bytes", "2000") as server:
        server.wait_for_state("ready")
        yield server
