import pytest

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
