"""Prometheus figures of engines on demand."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from server.gateway.demand import Demand


class DemandFigures(Collector):
    """Starts, stops and waits since the gateway began. The label `replica` is the engine's name."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        self._demands = tuple(demands)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | SummaryMetricFamily]:
        """The figures now."""
        starts = CounterMetricFamily("voltserve_demand_starts", "Starts that requests asked for", labels=["replica"])
        stops = CounterMetricFamily(
            "voltserve_demand_stops", "Stops, to make room or for want of requests", labels=["replica", "reason"]
        )
        waiting = GaugeMetricFamily(
            "voltserve_demand_waiting", "Requests that wait for the engine's start", labels=["replica"]
        )
        waits = SummaryMetricFamily(
            "voltserve_demand_wait_seconds", "Time that requests waited for a start", labels=["replica"]
        )
        for demand in self._demands:
            counts = demand.counts
            starts.add_metric([demand.name], counts.starts)
            stops.add_metric([demand.name, "swap"], counts.swaps)
            stops.add_metric([demand.name, "idle"], counts.idle_stops)
            waiting.add_metric([demand.name], demand.waiting)
            waits.add_metric([demand.name], counts.waits, counts.waited)
        yield from (starts, stops, waiting, waits)
