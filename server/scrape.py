"""Reads `/metrics`: numbers from Prometheus' text format."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.errors import UserError


class ScrapeError(UserError):
    """`/metrics` does not answer, or not in Prometheus' text format."""

    exit_code = 1


@dataclass(frozen=True)
class Metrics:
    """Each sample's values over its series (labels are left out), by the sample's name."""

    values: Mapping[str, tuple[float, ...]]

    def sum(self, name: str) -> float:
        """Over all series; 0 where there is none."""
        return sum(self.values.get(name, ()))

    def largest(self, name: str) -> float:
        """Over all series; 0 where there is none."""
        return max(self.values.get(name, ()), default=0.0)

    def __contains__(self, name: str) -> bool:
        return name in self.values


def parse(text: str) -> Metrics:
    """The samples of a text.

    Raises:
        ScrapeError: it is not of that format.
    """
    values: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(sample.value)
    except ValueError as error:
        raise ScrapeError(f"/metrics: expected Prometheus' text format, got: {error}") from error
    return Metrics({name: tuple(found) for name, found in values.items()})


def scrape(url: str, limit: float = 30.0) -> Metrics:
    """A server's metrics, asked for at `url` (without /metrics).

    Raises:
        ScrapeError: they do not arrive within `limit` seconds.
    """
    try:
        text = httpx.get(f"{url}/metrics", timeout=limit).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ScrapeError(f"{url}/metrics: {error or type(error).__name__}") from error
    return parse(text)
