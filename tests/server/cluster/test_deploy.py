import json
from pathlib import Path

import pytest

from server import logs
from server.cluster.deploy import _child, _lines
from server.config.engines_file import OF_AN_ENGINE
from server.config.settings import load_settings
from server.errors import ConfigError


def test_a_gateway_has_its_settings_from_command_line_and_environment() -> None:
    environ = {
        "VOLTSERVE_PORT": "9",
        "VOLTSERVE_QUEUE_SIZE": "3",
        "VOLTSERVE_MAX_MODEL_LEN": "7",
        "VOLTSERVE_HOST": "::",
    }
    settings = load_settings(["--host", "198.18.0.1"], environ, "cluster.yaml", OF_AN_ENGINE)
    assert (settings.host, settings.port, settings.model) == ("198.18.0.1", 9, "cluster.yaml")
    assert settings.queue_size == 256, "the environment's is for engines of this machine"


@pytest.mark.parametrize(
    "flags", [["--model", "m"], ["--max-model-len", "7"], ["--preset", "x"], ["--queue-size", "1"]]
)
def test_what_is_an_engine_s_belongs_into_the_file(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]} is an engine's: put it into cluster.yaml"):
        load_settings(flags, {}, "cluster.yaml", OF_AN_ENGINE)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="--port"):
        load_settings(["--port", "99999"], {}, "cluster.yaml", OF_AN_ENGINE)


async def test_what_a_child_and_ray_print_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prints.py").write_text(
        "import sys\nprint('2026-12-01 INFO worker.py:1 -- Ray says', file=sys.stderr)\n"
        "print('ERROR: a plain line', file=sys.stderr)\nprint('{\"n\": 1}')\nsys.stderr.write('no end of line')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    written: list[str] = []
    logs.configure("info", "json", written.append)
    async with _child("prints") as child:
        assert [found async for found in _lines(child)] == [{"n": 1}]
    told = [(one["level"], one["event"]) for one in map(json.loads, written)]
    expected = [
        ("info", "2026-12-01 INFO worker.py:1 -- Ray says"),
        ("error", "ERROR: a plain line"),
        ("info", "no end of line"),
    ]
    assert [one for one in told if one in expected] == expected, told  # tests before this one may log, too
