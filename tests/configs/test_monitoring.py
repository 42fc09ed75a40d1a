from __future__ import annotations

from itertools import combinations

import pytest
import yaml

from server.supervisor import State

from .monitoring import CONFIGS, DASHBOARD, PANELS, RULES, expressions, metrics


def read(name: str) -> dict[str, object]:
    content: dict[str, object] = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    return content


def test_every_query_reads_some_series() -> None:
    assert expressions()
    for expression in expressions():
        assert metrics(expression), expression


def test_a_name_in_a_label_is_no_series() -> None:
    assert metrics('sum(rate(vllm:x_total{job="voltserve_y"}[1m])) / up{job="voltserve"}') == {"vllm:x_total", "up"}


def test_every_panel_says_what_it_shows_and_asks_the_provisioned_source() -> None:
    sources = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    uids = {source["uid"] for source in sources}  # type: ignore[attr-defined]
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]} == uids


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def test_every_state_has_a_colour() -> None:
    panel = next(panel for panel in PANELS if panel["type"] == "state-timeline")
    coloured = " ".join(one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"])
    assert [state for state in State if state.value not in coloured] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_look_at(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description"}
