"""The supervisor with the fake engine, without the gateway: every state, every way to fail."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from server.config.devices import Devices
from server.config.render import engine_socket, progress_socket, render_launch
from server.config.settings import load_config
from server.supervisor import State, Status, Supervisor
from server.supervisor.probe import engine_client, wait_until_it_answers
from server.supervisor.process import running
from server.supervisor.supervisor import MAX_FAILURES, backoff
from tests.server.conftest import LIMIT, alive, make_model


class Watched:
    """A running supervisor and every status it has had."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.seen: list[Status] = []
        supervisor.subscribe(self.seen.append)

    @property
    def states(self) -> list[str]:
        """The states in order, without repetition."""
        names = [status.state.value for status in self.seen]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    async def until(self, condition: Callable[[Status], object]) -> Status:
        met = asyncio.Event()
        self.supervisor.subscribe(lambda status: met.set() if condition(status) else None)
        if not condition(self.supervisor.status):
            await asyncio.wait_for(met.wait(), LIMIT)
        return next(status for status in reversed(self.seen) if condition(status))

    async def until_state(self, state: State) -> Status:
        return await self.until(lambda status: status.state is state)

    @property
    def pid(self) -> int:
        process = self.supervisor._process
        assert process is not None
        return process.group


@asynccontextmanager
async def supervised(model: Path, *flags: str) -> AsyncIterator[Watched]:
    config = load_config(["--model", str(model), *flags], {}, lambda: Devices((), "none"))
    runtime = model.parent
    launch = render_launch(config, runtime, {"PATH": os.environ["PATH"]}, module="tests.fakes.engine")
    async with engine_client(str(engine_socket(runtime))) as client:
        supervisor = Supervisor(config, launch, runtime, client, backoff=lambda _: 0.01)
        watched = Watched(supervisor)
        run = asyncio.create_task(supervisor.run())
        try:
            yield watched
        finally:
            supervisor.drain("the test ends")
            supervisor.stop()
            await asyncio.wait_for(run, LIMIT)


async def test_a_start_goes_through_every_state_to_ready_and_tells_its_progress(model: Path) -> None:
    async with supervised(model) as watched:
        status = await watched.until_state(State.READY)
        assert watched.states == ["starting", "loading", "warming", "ready"]
        phases = [one.progress.phase for one in watched.seen if one.progress]
        assert list(dict.fromkeys(phases)) == ["importing", "configuring", "weights", "warmup", "first completion"]
        assert any(one.progress.done == 400 and one.progress.total == 1000 for one in watched.seen if one.progress)
        assert [decision.what for decision in status.decisions] == ["attention"]
        group = watched.pid
    assert watched.states[-1] == "draining"
    assert running(group) == []


async def test_an_engine_without_progress_becomes_ready_all_the_same(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", quiet=True)) as watched:
        await watched.until_state(State.READY)
        assert watched.states == ["starting", "loading", "warming", "ready"]


async def test_a_first_completion_that_is_odd_is_a_warning_and_no_refusal(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", odd=True)) as watched:
        status = await watched.until_state(State.READY)
        assert "repeats '字' 12 times" in status.warnings[0]


async def test_a_pooling_model_proves_itself_by_an_embedding(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", pooling=True)) as watched:
        assert "/v1/embeddings worked" in (await watched.until_state(State.READY)).reason


async def test_a_crash_at_load_is_told_with_the_engine_s_last_words_and_tried_again(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", fail_first=2)) as watched:
        status = await watched.until_state(State.READY)
        reasons = [one.reason for one in watched.seen if one.state is State.FAILED]
        assert "exited with code 1 | ValueError: shard 5 of 8 is short (start 1)" in reasons
        assert status.restarts == 2
        assert status.last_exit is not None
        assert "start 2" in status.last_exit


async def test_a_cancellation_that_a_library_drops_does_not_keep_the_engine_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[bool] = []

    async def drops_one(client: httpx.AsyncClient) -> None:
        if dropped:
            return await wait_until_it_answers(client)
        try:
            await asyncio.sleep(LIMIT)
        except asyncio.CancelledError:
            dropped.append(True)
        return await asyncio.sleep(10 * LIMIT)

    monkeypatch.setattr("server.supervisor.supervisor.wait_until_it_answers", drops_one)
    async with supervised(make_model(tmp_path / "m", fail_first=1)) as watched:
        await watched.until_state(State.READY)
        assert dropped


async def test_repeated_failures_are_given_up_with_the_last_reason(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", fail_first=99)) as watched:
        status = await watched.until(lambda now: now.reason.startswith("given up"))
        assert status.state is State.FAILED
        assert status.retry_at is None
        assert f"given up after {MAX_FAILURES} failures in a row; the last: " in status.reason
        assert f"start {MAX_FAILURES}" in status.reason
        await asyncio.sleep(0.1)
        assert (tmp_path / "m" / "starts").read_text() == str(MAX_FAILURES)


async def test_an_engine_that_never_listens_fails_at_the_time_limit(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", hang=True), "--start-timeout", "1") as watched:
        status = await watched.until_state(State.FAILED)
        assert "not ready within 1 s (--start-timeout); it had come to: warmup" in status.reason


async def test_an_engine_that_answers_but_cannot_complete_is_not_ready(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", refusal=(500, "no kernel image"))) as watched:
        status = await watched.until_state(State.FAILED)
        assert "no kernel image" in status.reason
        assert "ready" not in watched.states


async def test_a_killed_engine_is_failed_with_the_signal_and_comes_back(model: Path) -> None:
    async with supervised(model) as watched:
        await watched.until_state(State.READY)
        os.kill(watched.pid, signal.SIGKILL)
        assert "SIGKILL" in (await watched.until_state(State.FAILED)).reason
        assert (await watched.until_state(State.READY)).restarts == 1


async def test_a_stopped_engine_is_degraded_and_ready_once_it_goes_on(model: Path) -> None:
    async with supervised(model, "--heartbeat-timeout", "0.3") as watched:
        await watched.until_state(State.READY)
        pid = watched.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert "no heartbeat within 0.3 s" in (await watched.until_state(State.DEGRADED)).reason
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await watched.until_state(State.READY)).restarts == 0


async def test_an_engine_that_hangs_is_killed_and_restarted(model: Path) -> None:
    flags = ("--heartbeat-timeout", "0.2", "--hang-timeout", "0.5", "--stop-timeout", "0.3")
    async with supervised(model, *flags) as watched:
        await watched.until_state(State.READY)
        os.kill(watched.pid, signal.SIGSTOP)
        assert "hung" in (await watched.until_state(State.FAILED)).reason
        assert (await watched.until_state(State.READY)).restarts == 1
        assert "degraded" in watched.states


async def test_a_core_that_hangs_behind_an_api_that_answers_is_found_and_ready_once_it_goes_on(model: Path) -> None:
    async with supervised(model, "--step-timeout", "0.5") as watched:
        await watched.until_state(State.READY)
        (model / "hung").touch()
        assert "its core has ended no step for 0.5 s" in (await watched.until_state(State.DEGRADED)).reason
        (model / "hung").unlink()
        assert (await watched.until_state(State.READY)).restarts == 0


async def test_a_core_that_hangs_too_long_is_restarted(model: Path) -> None:
    async with supervised(model, "--step-timeout", "0.3", "--hang-timeout", "0.3") as watched:
        await watched.until_state(State.READY)
        (model / "hung").touch()
        status = await watched.until_state(State.FAILED)
        (model / "hung").unlink()
        assert (
            "hung: its core has ended no step for 0.3 s (--step-timeout); gave it 0.3 s (--hang-timeout)"
            in status.reason
        )
        assert (await watched.until_state(State.READY)).restarts == 1


async def test_an_engine_without_pulses_is_judged_by_its_answers_alone(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", quiet=True), "--step-timeout", "0.1") as watched:
        await watched.until_state(State.READY)
        await asyncio.sleep(1.5)  # more than one heartbeat
        assert watched.states[-1] == "ready"


async def test_a_dead_core_behind_a_living_api_process_is_a_failure(model: Path) -> None:
    async with supervised(model) as watched:
        await watched.until_state(State.READY)
        (model / "dead").touch()
        assert "core process died" in (await watched.until_state(State.FAILED)).reason
        (model / "dead").unlink()
        await watched.until_state(State.READY)


async def test_children_of_a_killed_engine_do_not_outlive_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", spawn=True)
    async with supervised(model) as watched:
        await watched.until_state(State.READY)
        child = int((model / "child.pid").read_text())
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until(lambda status: status.restarts == 1)
        assert not alive(child)


async def test_an_engine_that_ignores_sigterm_is_killed_at_the_stop_timeout(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", ignore_sigterm=True, spawn=True)
    async with supervised(model, "--stop-timeout", "0.3") as watched:
        await watched.until_state(State.READY)
        group = watched.pid
    assert running(group) == []


async def test_stopping_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", hang=True)) as watched:
        await watched.until(lambda status: status.progress and status.progress.phase == "warmup")
        group = watched.pid
    assert running(group) == []
    assert watched.states == ["starting", "loading", "draining"]


async def test_stopping_between_two_starts_ends_at_once(tmp_path: Path) -> None:
    async with supervised(make_model(tmp_path / "m", fail_first=99)) as watched:
        watched.supervisor._backoff = lambda _: 600.0
        await watched.until(lambda status: status.retry_at is not None)
    assert watched.states[-2:] == ["failed", "draining"]


def test_the_backoff_doubles_up_to_a_minute() -> None:
    assert [backoff(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


async def test_error_lines_explain_an_exit_without_an_exception(tmp_path: Path) -> None:
    line = "ERROR 11-29 21:39:27 [a.py:1] disk full"
    async with supervised(make_model(tmp_path / "m", print_lines=[line], hang=True)) as watched:
        await watched.until(lambda now: now.progress and now.progress.phase == "warmup")
        os.kill(watched.pid, signal.SIGKILL)
        status = await watched.until(lambda now: now.last_exit and "|" in now.last_exit)
        assert line in str(status.last_exit)


LASTING = [
    "ValidationError: 1 validation error for ModelConfig",  # configuration
    "QuantError: a (b): expected finite values, got nan in bfloat16",  # model
    "PatchMismatchError: vllm.x:y of vllm: expected version 1, got 2",  # environment, but the same at each start
]


@pytest.mark.parametrize("line", LASTING)
async def test_a_failure_that_lasts_is_not_tried_again(tmp_path: Path, line: str) -> None:
    async with supervised(make_model(tmp_path / "m", print_lines=[line], fail_first=99)) as watched:
        status = await watched.until(lambda now: now.given_up)
        assert status.lasting
        assert status.reason.startswith("given up since another start would end the same; the last: exited with code 1")
        assert line in status.reason
        assert (status.retry_at, status.restarts) == (None, 0)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB",
        "RuntimeError: GPU is lost",
        "RuntimeError: NCCL error: unhandled",
    ],
)
async def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path, line: str) -> None:
    async with supervised(make_model(tmp_path / "m", print_lines=[line], fail_first=1)) as watched:
        assert (await watched.until_state(State.READY)).restarts == 1


async def test_an_engine_that_has_worked_is_started_again_whatever_ended_it(model: Path) -> None:
    async with supervised(model) as watched:
        await watched.until_state(State.READY)
        tell(model.parent, "quant.errors.QuantError", "expected finite values, got nan")
        os.kill(watched.pid, signal.SIGKILL)
        status = await watched.until(lambda now: now.diagnosis is not None)
        assert status.diagnosis is not None
        assert (status.diagnosis.id, status.diagnosis.retry) == ("not-finite", False)
        assert (await watched.until_state(State.READY)).restarts == 1


async def test_a_model_of_nan_is_never_ready(tmp_path: Path) -> None:
    refusal = (400, "Out of range float values are not JSON compliant")  # as the real one: JSON has no NaN
    async with supervised(make_model(tmp_path / "m", refusal=refusal)) as watched:
        status = await watched.until(lambda now: now.given_up)
        assert "came up, but does not work: the model's outputs are not finite" in status.reason
        assert status.diagnosis is not None
        assert status.diagnosis.id == "not-finite"
        assert "ready" not in watched.states


def tell(runtime: Path, kind: str, message: str) -> None:
    """What a process of the engine says when an exception ends it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        event = {"event": "fault", "type": kind, "message": message, "rank": 0}
        sock.sendto(json.dumps(event).encode(), str(progress_socket(runtime)))


async def test_once_it_serves_an_exception_is_told_by_its_type_and_known_by_its_message(model: Path) -> None:
    async with supervised(model) as watched:
        await watched.until_state(State.READY)
        tell(model.parent, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 MiB, canary")
        tell(model.parent, "", "the engine died: EngineCore exited with 1")
        os.kill(watched.pid, signal.SIGKILL)
        status = await watched.until(lambda now: now.diagnosis is not None)
        assert status.diagnosis is not None
        assert status.diagnosis.id == "cuda-out-of-memory"
        assert status.diagnosis.found == "torch.OutOfMemoryError (its message is in the log)"
        assert str(status.last_exit).endswith(
            " | torch.OutOfMemoryError (its message is in the log) | the engine died: EngineCore exited with 1"
        )
        assert not [one for one in watched.seen if "canary" in repr(one)]


async def test_failed_is_told_before_the_engine_is_stopped(tmp_path: Path) -> None:
    """So that gateways break off its streams at once, and not when a process that heeds no signal is gone."""
    model = make_model(tmp_path / "m", ignore_sigterm=True)
    flags = ("--heartbeat-timeout", "5", "--step-timeout", "0.3", "--hang-timeout", "0.3", "--stop-timeout", "2")
    async with supervised(model, *flags) as watched:
        await watched.until_state(State.READY)
        group = watched.pid
        alive_then: list[bool] = []
        watched.supervisor.subscribe(
            lambda now: alive_then.append(alive(group)) if now.state is State.FAILED and not alive_then else None
        )
        (model / "hung").touch()
        await watched.until_state(State.FAILED)
        (model / "hung").unlink()
        assert alive_then == [True]
        await watched.until_state(State.READY)
        assert not alive(group)
