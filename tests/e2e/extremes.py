"""Extreme requests: values of fields.py, each laid over an ordinary request of its route, alone or two at once."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.e2e.fields import EMBEDDINGS, FIELDS, ORDINARY, Values


def encoded(body: dict[str, Any]) -> bytes:
    """The body as JSON, with NaN and Infinity as Python spells them and `raw` texts as they are."""
    text = json.dumps(body)
    return re.sub(r'"<raw:[^>]*>"', lambda found: json.loads(found[0])[5:-1], text).encode()


@dataclass(frozen=True)
class Extreme:
    """One request.

    Attributes:
        names: the fields that are extreme in it, one or two.
        about: fields that a refusal may name.
        expected: `taken`, `refused` or `odd`.
    """

    route: str
    names: tuple[str, ...]
    about: frozenset[str]
    body: bytes
    expected: str
    long: bool

    def curl(self) -> str:
        """A command that repeats it, cut where it is very long."""
        shown = self.body.decode().replace("'", "'\\''")
        return f"curl -s $URL{self.route} -H 'Content-Type: application/json' -d '{shown[:600]}'" + (
            "…" * (len(shown) > 600)
        )


def _each(route: str) -> Iterator[tuple[str, Values, str, Any]]:
    for name, values in FIELDS[route].items():
        seen: set[str] = set()
        for expected in ("taken", "refused", "odd"):
            for value in getattr(values, expected):
                key = json.dumps(value)
                if key not in seen:
                    seen.add(key)
                    yield name, values, expected, value


def alone() -> Iterator[Extreme]:
    """Each extreme in a request of its own, on every route that knows the field."""
    for route in FIELDS:
        for name, values, expected, value in _each(route):
            yield _request(route, [(name, values, value)], expected)


def spread(seed: int) -> Iterator[Extreme]:
    """The same, but each value of a field on one of the routes that know it."""
    r = random.Random(seed)  # noqa: S311
    routes: dict[tuple[str, str], list[tuple[str, Values, str, Any]]] = {}
    for route in FIELDS:
        for name, values, expected, value in _each(route):
            routes.setdefault((name, json.dumps(value)), []).append((route, values, expected, value))
    for (name, _), known in routes.items():
        route, values, expected, value = r.choice(known)
        yield _request(route, [(name, values, value)], expected)


def _request(route: str, extremes: list[tuple[str, Values, Any]], expected: str) -> Extreme:
    beside = {name: value for _, values, _ in extremes for name, value in values.beside.items()}
    body = {**ORDINARY[route], **beside, **{name: value for name, _, value in extremes}}
    names = tuple(name for name, _, _ in extremes)
    about = frozenset({*names, *beside, *(name for _, values, _ in extremes for name in values.about)})
    judged = expected if route != EMBEDDINGS else "odd"  # this model embeds nothing
    return Extreme(route, names, about, encoded(body), judged, any(values.long for _, values, _ in extremes))


def pairs(seed: int) -> Iterator[Extreme]:
    """Two extremes of different fields in one request, in an order that the seed decides; without end."""
    r = random.Random(seed)  # noqa: S311
    routes = {route: list(_each(route)) for route in FIELDS if route != EMBEDDINGS}
    by_field = {
        route: [list(group) for _, group in itertools.groupby(each, lambda one: one[0])]
        for route, each in routes.items()
    }
    while True:
        route = r.choice(list(routes))
        first, second = (r.choice(group) for group in r.sample(by_field[route], 2))
        if first[0] in second[1].beside or second[0] in first[1].beside:
            continue
        # What is wrong only beside another field's ordinary value may be right beside its extreme.
        certain = any(one[2] == "refused" and not one[1].about and not one[1].beside for one in (first, second))
        expected = "refused" if certain else "odd"
        yield _request(route, [(name, values, value) for name, values, _, value in (first, second)], expected)
