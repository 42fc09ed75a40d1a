"""How a process without a cluster ends."""

import pytest
import ray

from server.cluster.on_ray.connect import connect


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError(), "ConnectionError"),  # a node that is just starting
        (ConnectionError("no running instance\nmore"), "no running instance"),
        (RuntimeError("another cluster"), "another cluster"),
    ],
)
def test_without_a_node_it_says_why_and_what_to_do_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, reason: str
) -> None:
    def fail(**_options: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(SystemExit) as ended:
        connect()
    assert ended.value.code == 2
    assert f"({reason}): start one with `ray start --head`" in capsys.readouterr().err
