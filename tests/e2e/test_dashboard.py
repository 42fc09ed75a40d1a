from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.configs.monitoring import PROMETHEUS_OWN, expressions, metrics

from .conftest import Service

pytestmark = pytest.mark.e2e


def test_every_series_that_dashboard_and_alerts_read_is_in_metrics(service: Service) -> None:
    text = httpx.get(f"{service.url}/metrics", timeout=5).text
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("",)}
    there = {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in suffixes.get(family.type, ("",))
    }
    missing = {name for expression in expressions() for name in metrics(expression)} - there - PROMETHEUS_OWN
    assert missing == set()
