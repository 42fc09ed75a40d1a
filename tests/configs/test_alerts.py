"""The alert rules and Alertmanager's configurations, tried with Prometheus's own tools where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .monitoring import CONFIGS, RULES

RULE_TESTS = CONFIGS.parent / "tests/docker/rules_test.yml"
ALERTMANAGER = sorted((CONFIGS / "alertmanager").glob("*.yml"))
TESTED = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(tool) is None, reason=f"{tool} is not installed; make test-docker installs it"
    )


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried_over_series_that_call_for_it_and_over_a_healthy_server_s() -> None:
    alerts = {rule["alert"] for rule in RULES}
    healthy, wrong = ({one["alertname"] for one in test["alert_rule_test"]} for test in TESTED)
    fired = {one["alertname"] for one in TESTED[1]["alert_rule_test"] if one.get("exp_alerts")}
    assert healthy == wrong == fired == alerts


@needs("promtool")
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    run("promtool", "test", "rules", str(RULE_TESTS))


@needs("promtool")
def test_prometheus_takes_its_configuration() -> None:
    run("promtool", "check", "config", str(CONFIGS / "prometheus/prometheus.yml"))


@needs("amtool")
@pytest.mark.parametrize("path", ALERTMANAGER, ids=lambda path: path.stem)
def test_alertmanager_takes_each_of_its_configurations(path: Path, tmp_path: Path) -> None:
    # Debian's 0.25 does not know url_file, which 0.26 added.
    text = path.read_text(encoding="utf-8").replace("url_file: /run/secrets/alert", "url: http://127.0.0.1:1/")
    (tmp_path / path.name).write_text(text)
    run("amtool", "check-config", str(tmp_path / path.name))


@pytest.mark.parametrize("path", ALERTMANAGER, ids=lambda path: path.stem)
def test_every_alert_goes_to_the_one_receiver_and_secrets_are_in_none_of_the_files(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    (receiver,) = content["receivers"]
    assert content["route"]["receiver"] == receiver["name"]
    assert "routes" not in content["route"]
    for kind, entries in receiver.items():
        for entry in entries if kind != "name" else ():
            secrets = [value for name, value in entry.items() if name.endswith("_file")]
            assert secrets == ["/run/secrets/alert"]
            assert not {"url", "auth_password"} & entry.keys()
