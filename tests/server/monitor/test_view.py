import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from server.monitor.figures import Figures, History, figures
from server.monitor.reading import GpuReading, Reading
from server.monitor.view import picture
from server.scrape import Metrics
from tests.server.conftest import make_model, serving

READY = figures(None, Reading(0.0, {"state": "ready", "model": "m", "preset": "p"}, Metrics({}), "", (), "no driver"))
GPU = GpuReading(0, "Tesla V100-PCIE-16GB", 15 * 2**30, 16 * 2**30, 70, ())


def shown(found: Figures, history: History | None = None, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="standard").print(
        picture(found, history or History(), "http://x")
    )
    return out.getvalue()


def test_the_picture_has_state_rates_queue_cache_and_gpus() -> None:
    history = History()
    history.add(57.8)
    found = replace(
        READY, generated=57.8, first_token=0.25, running=8, waiting=1, queued=2, cache=0.5, refused=4, gpus=(GPU,)
    )
    text = shown(found, history)
    for part in ("ready", "57.8", "█", "250 ms", "1 in the engine, 2 in the queue", "50%", "4 refused", "15.0 / 16.0"):
        assert part in text, part


@pytest.mark.parametrize(("temperature", "style"), [(70, ""), (80, "\x1b[33m"), (85, "\x1b[1;31m")])
def test_a_hot_card_stands_out(temperature: int, style: str) -> None:
    text = shown(replace(READY, gpus=(replace(GPU, temperature=temperature),)))
    assert f"{style}{temperature} °C" in text


def test_a_slowed_card_says_why() -> None:
    slowed = replace(GPU, throttle=("hardware thermal slowdown", "power cap"))
    assert "slowed: hardware thermal slowdown, power cap" in shown(replace(READY, gpus=(slowed,)), width=160)


def test_loading_shows_how_far_it_is() -> None:
    progress = {"phase": "weights", "done": 3, "total": 4, "elapsed": 12.5}
    assert "weights 75%, 12.5 s" in shown(replace(READY, state="loading", progress=progress))


def test_what_readiness_warned_of_is_shown() -> None:
    assert "it repeats '!' 12 times" in shown(replace(READY, warnings=("it repeats '!' 12 times",)))


def test_each_of_several_engines_is_shown() -> None:
    text = shown(replace(READY, engines=("a: ready", "b: stopped, 2 waiting: b waits: a is in use")))
    assert "b: stopped, 2 waiting: b waits: a is in use" in text


def test_a_narrow_terminal_breaks_nothing() -> None:
    assert all(len(line) < 400 for line in shown(replace(READY, gpus=(GPU,)), width=40).splitlines())


def test_the_command_writes_a_line_a_look_where_it_is_piped(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "model")) as served:
        served.wait_for_state("ready")
        served.post()
        command: list[str | Path] = [Path(sys.executable).with_name("voltserve"), "monitor", "--url", served.url]
        ran = subprocess.run([*command, "--count", "2", "--interval", "0.1"], capture_output=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.decode().splitlines()]
    assert [line["state"] for line in lines] == ["ready", "ready"]
    assert [line["generated"] for line in lines] == [None, 0.0]


def test_without_a_service_the_machine_is_still_watched() -> None:
    ran = subprocess.run(
        [Path(sys.executable).with_name("voltserve"), "monitor", "--url", "http://127.0.0.1:9", "--count", "1"],
        capture_output=True,
        check=True,
    )
    line = json.loads(ran.stdout)
    assert line["state"] == "no answer"
    assert "does not answer" in line["problem"]
    assert line["gpus"] or line["gpus_problem"]


def test_a_lost_gpu_is_shown_beside_the_others() -> None:
    text = shown(replace(READY, gpus=(GPU,), gpus_problem="GPU 1: GPU is lost"))
    assert "GPU 1: GPU is lost" in text
    assert GPU.name in text
