import json
from pathlib import Path
from typing import Any

import pytest

from server.monitor.figures import KEPT, Figures, History, figures
from server.monitor.reading import GpuReader, GpuReading, Reading
from server.scrape import Metrics
from tests.fakes.nvml import Replay

RECORDINGS = Path(__file__).parents[1] / "doctor" / "recordings"


def reading(at: float, metrics: dict[str, Any] | None = None, health: dict[str, Any] | None = None) -> Reading:
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in (metrics or {}).items()}
    return Reading(at, health or {}, Metrics(values), "", (), "no driver")


def test_rates_are_rises_over_the_time_between_two_looks_summed_over_engines() -> None:
    before = reading(10.0, {"vllm:generation_tokens_total": (100.0, 50.0), "vllm:prompt_tokens_total": 5.0})
    now = reading(12.0, {"vllm:generation_tokens_total": (160.0, 70.0), "vllm:prompt_tokens_total": 5.0})
    got = figures(before, now)
    assert (got.generated, got.prompt) == (40.0, 0.0)


def test_the_first_look_and_one_after_an_engine_began_anew_have_no_rate() -> None:
    high = reading(1.0, {"vllm:generation_tokens_total": 100.0})
    low = reading(2.0, {"vllm:generation_tokens_total": 3.0})
    assert figures(None, high).generated is None
    assert figures(high, low).generated is None
    assert figures(reading(0.0), high).generated is None


def test_time_to_the_first_token_is_the_mean_of_those_between_two_looks() -> None:
    name = "vllm:time_to_first_token_seconds"
    before = reading(0.0, {f"{name}_sum": 10.0, f"{name}_count": 10.0})
    now = reading(1.0, {f"{name}_sum": 11.2, f"{name}_count": 14.0})
    assert figures(before, now).first_token == pytest.approx(0.3)
    assert figures(now, now).first_token is None


def test_queues_are_added_and_the_fullest_cache_counts() -> None:
    got = figures(
        None,
        reading(
            0.0,
            {
                **{"vllm:num_requests_running": (3.0, 4.0), "vllm:num_requests_waiting": (0.0, 2.0)},
                **{"voltserve_requests_queued": 5.0, "vllm:kv_cache_usage_perc": (0.2, 0.9)},
            },
        ),
    )
    assert (got.running, got.waiting, got.queued, got.cache) == (7, 2, 5, 0.9)


def test_gpus_of_another_machine_are_those_its_service_tells_of() -> None:
    gpu = {"index": 0, "name": "Tesla V100", "memory_used": 1, "memory_total": 2, "temperature": 41}
    got = figures(None, reading(0.0, health={"state": "ready", "gpus": [gpu]}))
    assert got.gpus == (GpuReading(0, "Tesla V100", 1, 2, 41, ()),)
    assert got.gpus_problem == ""


def test_a_lost_gpu_of_another_machine_is_named() -> None:
    gpu = {
        "index": 0,
        "name": "V100",
        "memory_used": 1,
        "memory_total": 2,
        "temperature": 41,
        "throttle": ["power cap"],
    }
    lost = {
        "index": 1,
        "name": "V100",
        "memory_used": None,
        "memory_total": None,
        "temperature": None,
        "problem": "gone",
    }
    got = figures(None, reading(0.0, health={"state": "ready", "gpus": [gpu, lost]}))
    assert got.gpus == (GpuReading(0, "V100", 1, 2, 41, ("power cap",)),)
    assert got.gpus_problem == "GPU 1: gone"


def test_the_curve_is_scaled_to_the_largest_rate_and_keeps_a_minute() -> None:
    history = History()
    for rate in (0.0, None, 50.0, 100.0):
        history.add(rate)
    assert history.curve() == " ▄█"
    for _ in range(2 * KEPT):
        history.add(0.0)
    assert history.curve() == " " * KEPT


def test_figures_are_json() -> None:
    value = figures(None, reading(0.0)).as_dict()
    assert json.loads(json.dumps(value))["state"] == "no answer"
    assert isinstance(figures(None, reading(0.0)), Figures)


@pytest.mark.parametrize("recording", ["v100x2-pcie", "h200x2"])
def test_recorded_gpus_are_read(recording: str) -> None:
    replay = Replay(json.loads((RECORDINGS / f"{recording}.json").read_text()))
    gpus, problem = GpuReader(replay).read()
    assert (len(gpus), problem) == (2, "")
    for gpu in gpus:
        assert 0 <= gpu.memory_used < gpu.memory_total
        assert gpu.temperature is not None


def test_a_machine_without_a_driver_has_a_reason_instead_of_gpus() -> None:
    replay = Replay({"nvmlInit()": {"error": 12}})  # NVML_ERROR_LIBRARY_NOT_FOUND
    gpus, problem = GpuReader(replay).read()
    assert gpus == ()
    assert "Not Found" in problem


def test_of_several_engines_each_has_its_state_in_words() -> None:
    waits = {"waiting": 2, "waits_for": "b waits: a is in use"}
    engines = [
        {"name": "a", "state": "ready", "reason": "works", "on_demand": {"waiting": 0, "waits_for": ""}},
        {"name": "b", "state": "stopped", "reason": "it made room for a", "on_demand": waits},
        {"name": "c", "state": "stopped", "reason": "no request for 9 s", "on_demand": {"waiting": 0, "waits_for": ""}},
        {"name": "d", "state": "loading", "reason": "the model is being loaded"},
    ]
    assert figures(None, reading(0.0, health={"state": "ready", "engines": engines})).engines == (
        "a: ready",
        "b: stopped, 2 waiting: b waits: a is in use",
        "c: stopped (no request for 9 s)",
        "d: loading",
    )
