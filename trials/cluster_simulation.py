"""A queueing simulation of `voltserve deploy`: one gateway, many replicas, requests at random times.

The gateway is one core that serves in turn: each request and each token takes its CPU time there. A replica takes
`slots` requests at once. It gives each a token every `step` seconds, all in the same instant, as an engine's step does.
A request waits for a free place at the least loaded replica.
"""

import heapq
import json
import random
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MACHINES = (1, 3, 10, 25, 50, 75, 90, 100, 120)
# A machine of two V100s with a 32B model, as the reference document has it: 140 tokens per second over 32 requests.
SLOTS, TOKENS_A_SECOND, ANSWER = 32, 140.0, 256
BUSY = 0.7  # the load, as a share of what the replicas can do
WARM_UP = 1 / 3  # of the time simulated, in which nothing is counted: longer than an answer
SEED = 1


@dataclass(frozen=True)
class Costs:
    """CPU seconds of the gateway: of a request, and of each token."""

    request: float
    token: float


@dataclass(frozen=True)
class Replica:
    """One replica: `slots` requests at once, a token of each every `step` seconds, `tokens` per answer."""

    slots: int
    step: float
    tokens: int

    @property
    def tokens_a_second(self) -> float:
        """With every place taken."""
        return self.slots / self.step


@dataclass
class Seen:
    """What a simulation saw after its warm-up: seconds to first tokens, tokens, CPU seconds of the gateway."""

    seconds: float
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    busy: float = 0.0


@dataclass
class Request:
    """A request in flight; `client` is negative for those that arrive at random."""

    asked: float
    left: int
    client: int


class Simulation:
    """`count` replicas behind one gateway, under `rate` requests per second at random times (Poisson), or under
    `clients` that ask again once they are answered.
    """

    def __init__(
        self, replica: Replica, count: int, costs: Costs, seconds: float, *, rate: float = 0.0, clients: int = 0
    ) -> None:
        self.replica, self.costs, self.seconds, self.rate = replica, costs, seconds, rate
        self.seen = Seen((1 - WARM_UP) * seconds)
        self._chance = random.Random(SEED)  # noqa: S311 - times of requests, not secrets
        self._running: list[list[Request]] = [[] for _ in range(count)]
        self._waiting: deque[Request] = deque()
        self._free_at = 0.0  # when the gateway has done what it was given
        self._events: list[tuple[float, int, bool, int]] = []  # when, order, whether a client asks, which
        self._order = 0
        for which in range(count):
            self._schedule(self._chance.random() * replica.step, asks=False, which=which)
        for client in range(clients):
            self._schedule(0.0, asks=True, which=client)
        if rate:
            self._schedule(self._chance.expovariate(rate), asks=True, which=-1)

    def run(self) -> Seen:
        """Event after event, to the end of `seconds`."""
        while self._events and self._events[0][0] < self.seconds:
            now, _, asks, which = heapq.heappop(self._events)
            if asks:
                self._ask(now, which)
            else:
                self._step(now, which)
            while self._waiting and min(map(len, self._running)) < self.replica.slots:
                min(self._running, key=len).append(self._waiting.popleft())
        return self.seen

    def _ask(self, now: float, client: int) -> None:
        if client < 0:
            self._schedule(now + self._chance.expovariate(self.rate), asks=True, which=-1)
        self._serve(now, self.costs.request)
        self._waiting.append(Request(now, self.replica.tokens, client))

    def _step(self, now: float, which: int) -> None:
        self._schedule(now + self.replica.step, asks=False, which=which)
        for request in list(self._running[which]):
            delivered = self._serve(now, self.costs.token)
            if self._counts(now):
                self.seen.tokens += 1
                if request.left == self.replica.tokens:
                    self.seen.first.append(delivered - request.asked)
            request.left -= 1
            if not request.left:
                self._running[which].remove(request)
                if request.client >= 0:
                    self._schedule(delivered, asks=True, which=request.client)

    def _serve(self, now: float, cost: float) -> float:
        """When the gateway's loop, which serves in turn, has finished this."""
        self._free_at = max(self._free_at, now) + cost
        if self._counts(now):
            self.seen.busy += cost
        return self._free_at

    def _counts(self, now: float) -> bool:
        return now > self.seconds - self.seen.seconds

    def _schedule(self, when: float, *, asks: bool, which: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, asks, which))


def check(runs: dict[str, Any], costs: Costs) -> list[dict[str, Any]]:
    """Each measured run, simulated with its own clients, and with the pace that the engine had without a gateway."""
    rows = []
    slots, tokens = runs["script"]["slots"], runs["script"]["tokens"]
    replica = Replica(slots, slots / runs["one_replica_both_ways"]["tokens_per_second"]["direct"], tokens)
    for run in runs["replicas"]:
        seen = Simulation(replica, run["replicas"], costs, 60.0, clients=run["clients"]).run()
        simulated = seen.tokens / seen.seconds
        rows.append(
            {
                "replicas": run["replicas"],
                "tokens_per_second": {"measured": run["tokens_per_second"], "simulated": round(simulated, 2)},
                "off_percent": round(100 * (simulated / run["tokens_per_second"] - 1), 2),
                "ttft_p50_s": {"measured": run["ttft_p50_s"], "simulated": round(statistics.median(seen.first), 3)},
            }
        )
    return rows


def grow(costs: Costs, seconds: float) -> list[dict[str, Any]]:
    """V100 machines behind one gateway, in growing numbers, at the same load per machine."""
    replica = Replica(SLOTS, SLOTS / TOKENS_A_SECOND, ANSWER)
    free = Costs(0.0, 0.0)
    rows = []
    for count in MACHINES:
        rate = BUSY * count * replica.tokens_a_second / replica.tokens
        seen, ideal = (Simulation(replica, count, cost, seconds, rate=rate).run() for cost in (costs, free))
        added = [statistics.median(seen.first) - statistics.median(ideal.first), p99(seen.first) - p99(ideal.first)]
        rows.append(
            {
                "machines": count,
                "requests_per_second": round(rate, 2),
                "tokens_per_second": round(seen.tokens / seen.seconds, 1),
                "gateway_busy": round(seen.busy / seen.seconds, 4),
                "ttft_p50_s": round(statistics.median(seen.first), 4),
                "ttft_added_by_the_gateway_ms": {"p50": round(1000 * added[0], 2), "p99": round(1000 * added[1], 2)},
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def gateway_limit(costs: Costs) -> dict[str, Any]:
    """The machines at which one gateway's core would be busy all the time, at `BUSY` and with every place taken."""
    a_token = costs.token + costs.request / ANSWER
    machine = TOKENS_A_SECOND * a_token
    return {
        "cpu_us_a_token_requests_included": round(1e6 * a_token, 1),
        "machines_at_the_load_simulated": int(1 / (machine * BUSY)),
        "machines_with_every_place_taken": int(1 / machine),
    }


def head_load(runs: dict[str, Any]) -> dict[str, Any]:
    """Ray's own work on the head: percent of a core by part, extrapolated from the measured runs to 100 machines."""
    seen = [*runs["replicas"], runs["many"]]
    counts = [run["replicas"] for run in seen]
    parts: dict[str, Any] = {}
    for part in seen[0]["head_cpu_percent_idle"]:
        line = statistics.linear_regression(counts, [run["head_cpu_percent_idle"][part] for run in seen])
        at_100 = line.intercept + 100 * line.slope
        parts[part] = {
            "percent_of_a_core": {"without_replicas": round(line.intercept, 2), "a_replica": round(line.slope, 3),
                                  "at_100": round(at_100, 1)},
            "replicas_that_fill_a_core": int((100 - line.intercept) / line.slope) if line.slope > 0 else None,
        }  # fmt: skip
    return parts


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The gateway's load and what it adds to the time to first token, over the number of machines."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "voltserve"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    machines = [row["machines"] for row in rows]
    left.plot(machines, [100 * row["gateway_busy"] for row in rows], marker="o")
    left.set(title="One gateway (computed)", xlabel="machines", ylabel="busy, % of a core", ylim=(0, 105))
    for which in ("p50", "p99"):
        right.plot(machines, [row["ttft_added_by_the_gateway_ms"][which] for row in rows], marker="o", label=which)
    right.set(title="Added to the time to first token (computed)", xlabel="machines", ylabel="ms", yscale="symlog")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
