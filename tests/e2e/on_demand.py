"""Two models on one CPU, swapped on demand: 200 requests of 8 clients that alternate, then a kill during a swap.

    .venv/bin/python -m tests.e2e.on_demand --out docs/results/on-demand-DATE.json

Every second request is a stream. `swap_seconds` are from one model's last answer to the next model's first one.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from lookalikes.random_models import QWEN3, formats, write_model, write_tokenizer
from server.machine import describe_machine, today
from tests.e2e.conftest import MODEL, ROOT, Service, serving
from tests.waiting import wait_until

CLIENTS, REQUESTS = 8, 200
NAMES = ("smollm2", "look-alike")
TOKENS = 8
RESIDENCE = 6.0
LIMIT_S = 3000.0  # a bound on a hang, not a check of speed

FILE = """
schema: 1
models:
  - name: smollm2
    flags: {{model: {smollm2}, served-model-name: [smollm2], max-model-len: 512}}
    on_demand: true
    min_residence: {residence}
  - name: look-alike
    flags: {{model: {lookalike}, served-model-name: [look-alike], max-model-len: 128, quantization: {quantization}}}
    on_demand: true
    min_residence: {residence}
"""


@dataclass
class Seen:
    """What the clients saw. `order` has each client's answers by their number, in the order of their arrival."""

    answered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    order: list[list[int]] = field(default_factory=lambda: [[] for _ in range(CLIENTS)])
    problems: list[str] = field(default_factory=list)
    comments: int = 0
    times: list[tuple[float, float, str]] = field(default_factory=list)  # asked, answered, model


@dataclass(frozen=True)
class Outcome:
    """The result. `longest_wait` and `swap_seconds` in seconds."""

    requests: int
    clients: int
    answered: dict[str, int]
    lost: list[str]
    order_kept: bool
    starts: dict[str, int]
    swaps: int
    requests_per_swap: float
    swap_seconds: list[float]
    longest_wait: float
    seconds: float
    comments_in_streams: int
    killed_in_a_swap: dict[str, Any]
    processes_left: int


def write_file(folder: Path) -> Path:
    """The engines file, and the second model."""
    lookalike = folder / "look-alike"
    write_model(lookalike, folder / "twin", QWEN3, "quasarnvfp4")
    write_tokenizer(lookalike)
    values = {"smollm2": ROOT / MODEL, "lookalike": lookalike, "residence": RESIDENCE}
    quantization = formats("")["quasarnvfp4"].quantization
    file = folder / "engines.yaml"
    file.write_text(FILE.format(**values, quantization=quantization), encoding="utf-8")
    return file


def run(folder: Path) -> Outcome:
    """All of it."""
    file = write_file(folder)
    with serving(folder / "log", "--engines", str(file), model="") as service:
        began = time.monotonic()
        seen = Seen()
        threads = [threading.Thread(target=client, args=(service, number, seen)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        seconds = time.monotonic() - began
        swaps = int(service.metric("voltserve_demand_stops_total"))
        starts = {one["name"]: one["on_demand"]["starts"] for one in engines(service).values()}
        killed = kill_in_a_swap(service)
        processes = service.processes()
    left = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    in_order = [sorted(order) == order and len(order) == REQUESTS // CLIENTS for order in seen.order]
    return Outcome(
        requests=REQUESTS,
        clients=CLIENTS,
        answered=seen.answered,
        lost=seen.problems,
        order_kept=all(in_order),
        starts=starts,
        swaps=swaps,
        requests_per_swap=round(REQUESTS / max(1, swaps), 1),
        swap_seconds=swap_seconds(seen.times),
        longest_wait=round(max(end - start for start, end, _ in seen.times), 1),
        seconds=round(seconds, 1),
        comments_in_streams=seen.comments,
        killed_in_a_swap=killed,
        processes_left=len(left),
    )


def client(service: Service, number: int, seen: Seen) -> None:
    """One client: its share of the requests, one after another, each for the other model."""
    with httpx.Client(base_url=service.url, timeout=LIMIT_S) as http:
        for index in range(REQUESTS // CLIENTS):
            model = NAMES[(number + index) % len(NAMES)]
            stream = index % 4 >= 2
            asked = time.monotonic()
            try:
                comments = ask(http, model, f"client {number} asks {index}", stream=stream)
            except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                seen.problems.append(f"client {number}, request {index}: {type(error).__name__} {error}")
                continue
            seen.times.append((asked, time.monotonic(), model))
            seen.order[number].append(index)
            seen.answered[model] += 1
            seen.comments += comments


def ask(http: httpx.Client, model: str, prompt: str, *, stream: bool) -> int:
    """One request, checked. Returns the comments in its stream."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text[:300]
    if not stream:
        assert answer.json()["model"] == model
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        return 0
    events = [event for event in answer.text.split("\n\n") if event]
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1][:300]
    assert {json.loads(one)["model"] for one in data[:-1]} == {model}
    return sum(event.startswith(":") for event in events)


def engines(service: Service) -> dict[str, dict[str, Any]]:
    """The engines in /health, by name."""
    found = service.health()
    assert found is not None
    return {one["name"]: one for one in found[1]["engines"]}


def kill_in_a_swap(service: Service) -> dict[str, Any]:
    """Asks for the model that is stopped, and kills its engine while it starts. Then asks again."""
    wanted = next(name for name, one in engines(service).items() if one["state"] == "stopped")
    answers: list[httpx.Response] = []

    def post() -> None:
        body = {"model": wanted, "prompt": "Hi", "max_tokens": 1}
        answers.append(httpx.post(f"{service.url}/v1/completions", json=body, timeout=LIMIT_S))

    asking = threading.Thread(target=post)
    asking.start()
    wait_until(lambda: engines(service)[wanted]["state"] == "loading", 300, "it loads")
    launcher = psutil.Process(service.process.pid).children()[0]
    os.kill(launcher.pid, signal.SIGKILL)
    asking.join(LIMIT_S)
    first = answers[0]
    left = len(psutil.Process(service.process.pid).children(recursive=True))
    wait_until(lambda: int(engines(service)[wanted]["restart_in"] or 0) == 0, 60, "it may start again")
    time.sleep(1)
    post()
    return {
        "status": first.status_code,
        "code": first.json()["error"]["code"],
        "processes_after": left,
        "status_of_the_next_attempt": answers[1].status_code,
    }


def swap_seconds(times: list[tuple[float, float, str]]) -> list[float]:
    """From one model's last answer to the next one's first, in order."""
    by_end = sorted((end, model) for _, end, model in times)
    pairs = itertools.pairwise(by_end)
    return [round(later - earlier, 1) for (earlier, one), (later, other) in pairs if one != other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder))
    result = {
        "kind": "measured",
        "date": today(),
        "machine": machine,
        "command": " ".join(["python -m tests.e2e.on_demand", *sys.argv[1:]]),
        "models": {NAMES[0]: MODEL, NAMES[1]: "lookalikes.random_models.QWEN3, quasarnvfp4"},
        "min_residence": RESIDENCE,
        **asdict(outcome),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
