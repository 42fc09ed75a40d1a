"""Computes figures from outcomes: pure functions with vLLM's own definitions, so that both tools can be compared.

    TTFT   seconds from sending a request to its first piece of text
    E2E    seconds from sending a request to its last piece of text
    TPOT   (E2E − TTFT) / (output tokens − 1): a request's mean time per further token
    ITL    the gaps between pieces of text within a request, over all requests
    user   the median of 1 / TPOT: the tokens per second that one user sees
    total  output tokens of all successful requests per second, from the first sending to the last answer

In an open loop TTFT and E2E count from when the request was due, so that a late generator cannot hide a queue. Tokens
are those that the server counts. Failed requests count in `errors` only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from server.bench.client import Outcome
from server.bench.load import Closed
from server.bench.run import LevelResult


@dataclass(frozen=True)
class Distribution:
    """Seconds; percentiles interpolate linearly between the two nearest values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None of no values."""
        if not values:
            return None
        p50, p90, p95, p99 = (float(one) for one in np.percentile(values, (50, 90, 95, 99)))
        return cls(float(np.mean(values)), p50, p90, p95, p99, float(np.max(values)))


@dataclass(frozen=True)
class Summary:
    """A level in figures; rates per second. `late`: how much later than due the generator sent (open loop)."""

    level: str
    loop: str
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    user_tokens_per_s: float | None
    requests_per_s: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    late: Distribution | None
    warmup_requests: int
    warmup_failed: int
    warmup_seconds: float
    generator_share: float
    load_average: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, to the microsecond."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def summarize(result: LevelResult) -> Summary:
    """A level's figures."""
    good = [outcome for outcome in result.outcomes if not outcome.error]
    failed = len(result.outcomes) - len(good)
    tpot = [
        (one.events[-1] - one.events[0]) / (one.output_tokens - 1)
        for one in good
        if one.output_tokens > 1 and one.events[-1] > one.events[0]
    ]
    output = sum(outcome.output_tokens for outcome in good)
    gaps = [float(gap) for one in good for gap in np.diff(one.events)]
    closed = isinstance(result.level, Closed)
    return Summary(
        level=result.level.label,
        loop="closed" if closed else "open",
        requests=len(result.outcomes),
        failed=failed,
        errors=dict(Counter(outcome.error for outcome in result.outcomes if outcome.error).most_common()),
        seconds=result.seconds,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        output_tokens=output,
        tokens_per_s=output / result.seconds,
        user_tokens_per_s=1 / float(np.median(tpot)) if tpot else None,
        requests_per_s=len(good) / result.seconds,
        ttft=Distribution.of([one.events[0] - one.due for one in good]),
        itl=Distribution.of(gaps),
        tpot=Distribution.of(tpot),
        e2e=Distribution.of([one.events[-1] - one.due for one in good]),
        late=None if closed else Distribution.of([one.sent - one.due for one in result.outcomes]),
        warmup_requests=result.warmup.requests,
        warmup_failed=result.warmup.failed,
        warmup_seconds=result.warmup.seconds,
        generator_share=result.generator_share,
        load_average=result.load_average,
    )


def timeline(outcomes: Sequence[Outcome], seconds: float, bins: int = 40) -> list[tuple[float, float, float]]:
    """(middle of the bin in seconds, pieces of text per second, mean requests in flight), from 0 to `seconds`."""
    edges = np.linspace(0, seconds, bins + 1)
    width = seconds / bins
    events = [moment for outcome in outcomes for moment in outcome.events]
    tokens = np.histogram(events, edges)[0] / width
    in_flight = np.zeros(bins)
    for outcome in outcomes:
        in_flight += np.clip(np.minimum(edges[1:], outcome.ended) - np.maximum(edges[:-1], outcome.sent), 0, None)
    return [
        (float(start + width / 2), float(rate), float(busy / width))
        for start, rate, busy in zip(edges[:-1], tokens, in_flight, strict=True)
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return value
