import subprocess
import sys
from pathlib import Path

import pytest

from server.errors import ConfigError
from server.run import healthcheck
from tests.server.conftest import make_model, serving

ENTRY = ["tini", "--", "python", "-m", "server"]


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ([], {}, ("127.0.0.1", 8000)),
        (["--model", "m", "--port", "9000"], {"VOLTSERVE_HOST": "0.0.0.0"}, ("127.0.0.1", 9000)),  # noqa: S104
        (["--port=9001"], {"VOLTSERVE_PORT": "9000"}, ("127.0.0.1", 9001)),
        (["--host", "::"], {"VOLTSERVE_PORT": "9000"}, ("::1", 9000)),
        (["--host", "192.0.2.7"], {}, ("192.0.2.7", 8000)),
        (["--host", "localhost"], {}, ("localhost", 8000)),
    ],
)
def test_the_server_is_asked_where_it_listens(
    flags: list[str], environ: dict[str, str], expected: tuple[str, int]
) -> None:
    assert healthcheck.address([*ENTRY, *flags], environ) == expected


def test_another_process_1_and_malformed_flags_are_named() -> None:
    with pytest.raises(ValueError, match=r"-m server.*got 'bash -l'"):
        healthcheck.address(["bash", "-l"], {})
    with pytest.raises(ConfigError, match="--port"):
        healthcheck.address([*ENTRY, "--prot", "1"], {})


def check(tmp_path: Path, port: int) -> tuple[int, str]:
    """The module as Docker runs it, with a process 1 that was given this port."""
    command_line = tmp_path / "cmdline"
    command_line.write_bytes(b"\0".join(word.encode() for word in [*ENTRY, "--port", str(port)]) + b"\0")
    code = (
        "import sys; from pathlib import Path; from server.run import healthcheck; "
        "healthcheck.PROCESS_1 = Path(sys.argv[1]); sys.exit(healthcheck.main())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(command_line)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_healthy_is_what_ready_is(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m")) as server:
        server.wait_for_state("ready")
        port = int(server.url.rsplit(":", 1)[1])
        code, told = check(tmp_path, port)
        assert (code, '"state":"ready"' in told) == (0, True)
        server.process.terminate()
        server.process.wait(30)
    code, told = check(tmp_path, port)
    assert (code, "does not answer" in told) == (1, True)


def test_a_server_that_loads_is_not_healthy(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "m", load_seconds=60)) as server:
        code, told = check(tmp_path, int(server.url.rsplit(":", 1)[1]))
        assert (code, '"state":"ready"' in told) == (1, False)
