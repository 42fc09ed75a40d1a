import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quant.progress import Progress
from server.run.child import ServiceFailedError, running
from server.smoke.run import descendants
from tests.server.conftest import ROOT, alive, make_model, wait_for

FAKE = "tests.fakes.serve"


def test_a_service_is_ready_answers_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    with running(["--model", str(model)], tmp_path / "log", module=FAKE) as service:
        assert service.wait_until_ready("start", told.append) > 0
        family = [service.process.pid, *descendants(service.process.pid)]
        assert len(family) == 2
        assert service.health()["state"] == "ready"
    assert not [pid for pid in family if alive(pid)]
    assert service.process.returncode == 0
    assert all(one.what == "start" for one in told)


def test_what_serve_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailedError, match=r"serve ended with exit code 65: .* does not exist"):
        running(["--model", str(tmp_path / "none")], tmp_path / "log", module=FAKE).__enter__()


def test_an_engine_that_fails_once_is_a_failure_with_its_diagnosis(tmp_path: Path) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    model = make_model(tmp_path / "model", print_lines=[oom], fail_first=1)
    with (
        running(["--model", str(model)], tmp_path / "log", module=FAKE) as service,
        pytest.raises(ServiceFailedError) as caught,
    ):
        service.wait_until_ready()
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis["id"] == "cuda-out-of-memory"
    assert "max-model-len" in str(caught.value)


def test_a_serve_that_ends_by_itself_leaves_its_diagnosis(tmp_path: Path) -> None:
    line = "QuantError: a (b): expected finite values, got nan in bfloat16"
    model = make_model(tmp_path / "model", print_lines=[line], fail_first=99)
    with (
        running(["--model", str(model)], tmp_path / "log", module=FAKE) as service,
        pytest.raises(ServiceFailedError) as caught,
    ):
        service.process.wait(30)
        service.wait_until_ready()
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis["id"] == "not-finite"
    assert f"serve ended with exit code 65: {line}" in str(caught.value)
    assert "voltserve verify" in str(caught.value)


def test_variables_reach_the_engine(model: Path, tmp_path: Path) -> None:
    with running(["--model", str(model)], tmp_path / "log", {"OMP_NUM_THREADS": "7"}, FAKE) as service:
        service.wait_until_ready()
        (engine,) = descendants(service.process.pid)
        assert b"OMP_NUM_THREADS=7\0" in Path(f"/proc/{engine}/environ").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_stops_the_service_it_started(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom server.run.child import running\n"
        f"with running(['--model', {str(model)!r}], Path({str(tmp_path / 'log')!r}), module={FAKE!r}) as service:\n"
        "    service.wait_until_ready()\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stdout.readline() == b"up\n"
    family = descendants(command.pid)
    assert len(family) == 2
    command.send_signal(number)
    command.communicate()
    assert command.returncode in {143, -signal.SIGINT}
    wait_for(lambda: not [pid for pid in family if alive(pid)], "all of the service is gone")
