"""Sends extreme requests while other clients' streams run, and finds out whether they harm anybody else.

    .venv/bin/python -m tests.e2e.harm --seconds 600

starts a service. It sends each extreme of tests/e2e/extremes.py alone, and then pairs until the time is up. It prints
each fault with a command that repeats it, and continues after an engine's death.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import MODEL, Service, serving
from tests.e2e.extremes import Extreme, alone, pairs
from tests.e2e.fields import CHAT, COMPLETIONS
from tests.e2e.state import settled

HANG_S = 120.0  # for one answer: a bound on a hang, not a check of speed
LEAVE_S = 0.5  # how long a client waits where an answer may rightly take minutes
WORKERS = 4

_SEA = [{"role": "user", "content": "Tell me about the sea."}]
# Other clients' requests, streamed again and again: a greedy one, a seeded one, one that must keep to a grammar.
WITNESSES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}),
    (CHAT, {"messages": _SEA, "max_tokens": 40, "seed": 7, "temperature": 0.8, "top_p": 0.9, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": "A number:", "max_tokens": 30, "seed": 3, "structured_outputs": {"regex": "[0-9]{24}"}}),
)


@dataclass
class Fault:
    """What went wrong, and the requests that may have caused it; one where it is that request's own answer."""

    what: str
    suspects: list[Extreme] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n    ".join([self.what, *(suspect.curl() for suspect in self.suspects)])


@dataclass
class Found:
    """A run's outcome: `answered` by route and status, the slowest answer in seconds with its request."""

    faults: list[Fault] = field(default_factory=list)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    witnessed: int = 0
    slowest: tuple[float, str] = (0.0, "")


def stream_text(url: str, path: str, body: dict[str, Any]) -> str:
    """The whole text of a stream. Raises ValueError where it does not end as it should."""
    reply = httpx.post(f"{url}{path}", json={"model": MODEL, "stream": True, **body}, timeout=HANG_S)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    if reply.status_code != 200 or lines[-1:] != ["[DONE]"]:
        raise ValueError(f"{reply.status_code}, ending with {reply.text[-300:]}")
    events = [json.loads(line) for line in lines[:-1]]
    if broken := [event for event in events if "choices" not in event]:
        raise ValueError(f"an event of the stream is {broken[0]}")
    choices = [event["choices"][0] for event in events]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def verdict(extreme: Extreme, status: int, text: str) -> str:
    """What is wrong with the answer to an extreme; empty where nothing is."""
    said = text[:300]
    if status >= 500:
        return f"a {status}: {said}"
    if status == 200:
        return "taken, but must be refused" if extreme.expected == "refused" else ""
    if extreme.expected == "taken":
        return f"refused, but must be taken: {said}"
    return wrong_refusal(extreme, text)


def wrong_refusal(extreme: Extreme, text: str) -> str:
    """What is wrong with a 4xx: it has OpenAI's form and names a field that is extreme, or one beside it."""
    try:
        error = json.loads(text)["error"]
        shape = set(error)
    except (ValueError, KeyError, TypeError):
        shape = set()
    if shape != {"message", "type", "param", "code"}:
        return f"an error that is not in OpenAI's form: {text[:300]}"
    if error["code"] in {"invalid_json", "request_too_large", "unsupported_by_model"}:  # of no field
        return ""
    field_named = str(error["param"] or "").replace("[", ".").partition(".")[0]
    if field_named in extreme.about:
        return ""
    return f"a refusal that names {error['param']!r}, expected one of {sorted(extreme.about)}: {text[:300]}"


class Run:
    """One run of extremes against a service.

    Args:
        service: is ready.
        workers: extremes at once.
        go_on: whether to wait for the next engine where one has died, instead of ending.
    """

    def __init__(self, service: Service, workers: int = WORKERS, *, go_on: bool = False) -> None:
        self.found = Found()
        self._service = service
        self._workers = workers
        self._go_on = go_on
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._under_way: dict[int, Extreme] = {}
        self._answered: list[tuple[float, Extreme]] = []  # since the longest of the streams began
        self._restarts = 0

    def run(self, extremes: Iterable[Extreme], seconds: float) -> Found:
        """Sends them until there are no more, or the time is up, or the engine has died."""
        texts = [stream_text(self._service.url, path, body) for path, body in WITNESSES]
        todo: queue.Queue[Extreme | None] = queue.Queue(self._workers)
        watchers = [
            threading.Thread(target=self._watch, args=(*witness, text))
            for witness, text in zip(WITNESSES, texts, strict=True)
        ]
        senders = [threading.Thread(target=self._send_all, args=(todo,)) for _ in range(self._workers)]
        for thread in (*watchers, *senders):
            thread.start()
        end = time.monotonic() + seconds
        for extreme in extremes:
            if time.monotonic() > end or self._over.is_set():
                break
            todo.put(extreme)
        for _ in senders:
            todo.put(None)
        for thread in senders:
            thread.join()
        self._over.set()
        for thread in watchers:
            thread.join()
        return self.found

    def _fault(self, what: str, suspects: list[Extreme]) -> None:
        fault = Fault(what, suspects)
        with self._lock:
            self.found.faults.append(fault)
        print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)

    def _watch(self, path: str, body: dict[str, Any], expected: str) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                text = stream_text(self._service.url, path, body)
                if text != expected:
                    self._fault(f"a stream of {path}: {expected!r} became {text!r}", self._suspects(began))
            except (httpx.HTTPError, ValueError) as error:
                self._fault(f"a stream of {path} broke: {type(error).__name__} {error}", self._suspects(began))
                self._after_a_failure()
            with self._lock:
                self.found.witnessed += 1

    def _suspects(self, began: float) -> list[Extreme]:
        with self._lock:
            return [extreme for ended, extreme in self._answered if ended > began] + list(self._under_way.values())

    def _after_a_failure(self) -> None:
        if not self._go_on:
            self._over.set()
            return
        time.sleep(1.5)
        health = self._service.health()
        if health and health[0] == 200 and health[1]["restarts"] == self._restarts:
            return
        self._service.wait_ready()
        with self._lock:
            _, health_now = self._service.health() or (0, {"restarts": 0})
            died, self._restarts = health_now["restarts"] > self._restarts, health_now["restarts"]
            last = [extreme for _, extreme in self._answered[-4:]]
        if died:
            self._fault(f"DEATH: {health_now['last_exit']}", last)

    def _send_all(self, todo: queue.Queue[Extreme | None]) -> None:
        me = threading.get_ident()
        with httpx.Client(base_url=self._service.url) as client:
            while (extreme := todo.get()) is not None:
                if self._over.is_set():
                    continue
                with self._lock:
                    self._under_way[me] = extreme
                began = time.monotonic()
                answer = self._send(client, extreme)
                ended = time.monotonic()
                with self._lock:
                    del self._under_way[me]
                    self._answered = [one for one in self._answered if one[0] > ended - HANG_S] + [(ended, extreme)]
                    self.found.answered[(extreme.route, answer)] += 1
                    self.found.slowest = max(self.found.slowest, (round(ended - began, 2), extreme.curl()[:300]))

    def _send(self, client: httpx.Client, extreme: Extreme) -> str:
        """Sends one. Returns its status, or what arrived instead."""
        try:
            answer = _ask(client, extreme)
        except httpx.TransportError as error:
            self._fault(f"no answer: {type(error).__name__} {error}", [extreme])
            self._after_a_failure()
            return "none"
        if answer is None:
            return "left"
        if wrong := verdict(extreme, *answer):
            self._fault(wrong, [extreme])
            if answer[0] >= 500:
                self._after_a_failure()
        return str(answer[0])


def _ask(client: httpx.Client, extreme: Extreme) -> tuple[int, str] | None:
    """Status and body of an answer; None if the client left, as it does soon where answers are long.

    Raises:
        httpx.TransportError: there is no whole answer; a timeout where it does not end within HANG_S.
    """
    headers = {"content-type": "application/json"}
    limit = LEAVE_S if extreme.long else HANG_S
    end = time.monotonic() + limit
    body = b""
    try:
        with client.stream("POST", extreme.route, content=extreme.body, headers=headers, timeout=limit) as reply:
            for part in reply.iter_bytes():
                body += part
                if time.monotonic() > end:
                    break
            else:
                return reply.status_code, body.decode()
    except httpx.ReadTimeout:
        if not extreme.long:
            raise
    if not extreme.long:
        raise httpx.ReadTimeout(f"its end did not come within {HANG_S:g} s")
    return None


def check(service: Service, extremes: Iterable[Extreme], seconds: float, **how: Any) -> Found:
    """Runs the extremes, and compares the service before and after."""
    # Pools of connections and of threads have grown, and grammars were used, before anything is counted.
    Run(service, **how).run(itertools.islice(alone(), 40), seconds)
    before = settled(service)
    found = Run(service, **how).run(extremes, seconds)
    found.faults += [Fault(difference) for difference in before.differences(settled(service, before))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--seed", type=int, default=1, help="of the pairs")
    parser.add_argument("--only", nargs="*", default=[], help="fields: their extremes alone")
    parser.add_argument("--without", nargs="*", default=[], help="fields to leave out")
    parser.add_argument("--pairs", action="store_true", help="pairs alone")
    args = parser.parse_args()
    singles: Iterable[Extreme] = () if args.pairs else alone()
    twos: Iterable[Extreme] = () if args.only else pairs(args.seed)
    chosen = (
        extreme
        for extreme in itertools.chain(singles, twos)
        if not set(extreme.names) & set(args.without) and (not args.only or set(extreme.names) & set(args.only))
    )
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log") as service:
        found = check(service, chosen, args.seconds, workers=args.workers, go_on=True)
    print(found.answered, f"{found.witnessed} streams", found.slowest, f"{len(found.faults)} faults", sep="\n")


if __name__ == "__main__":
    main()
