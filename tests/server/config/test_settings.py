import shlex
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from server.config.devices import Device, Devices
from server.config.flags import engine_flags
from server.config.settings import Config, Settings, all_flags, is_loopback, load_config, setting_flags
from server.decisions import costly
from server.errors import ConfigError
from server.run.explain import as_text, explain

V100 = Device("Tesla V100-PCIE-16GB", "GPU-1", "7.0", 16, nvlink=False)
NONE = Devices((), "no driver")
PAIR = Devices((V100, V100))


def config(
    line: str, environ: Mapping[str, str] | None = None, devices: Devices = NONE, *, cpu_engine: bool | None = None
) -> Config:
    """On these devices, with the engine made for them unless one is named."""
    cpu_build = not devices.gpus if cpu_engine is None else cpu_engine
    with patch("server.config.settings.engine_is_cpu_build", lambda: cpu_build):
        return load_config(shlex.split(line), environ or {}, lambda: devices)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("VOLTSERVE_KEYSFILE", "VOLTSERVE_KEYS_FILE"),
        ("VOLTSERVE_MAXMODELLEN", "VOLTSERVE_MAX_MODEL_LEN"),
        ("VOLTSERVE_max_model_len", "VOLTSERVE_MAX_MODEL_LEN"),
    ],
)
def test_a_variable_that_differs_in_underscores_only_is_named_alone(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {meant}\?$"):
        load_config(["--model", "m"], {given: "1"}, lambda: Devices((), "none"))


@pytest.mark.parametrize("given", ["10.0.0.1/8", "proxy.example", "1.2.3"])
def test_a_proxy_to_trust_is_an_address_or_a_network(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--forwarded-allow-ips \(environment VOLTSERVE_FORWARDED_ALLOW_IPS\): "):
        load_config(["--model", "m"], {"VOLTSERVE_FORWARDED_ALLOW_IPS": given}, lambda: Devices((), "none"))


def test_the_command_line_beats_the_environment_and_that_the_preset() -> None:
    preset = config("--model m")
    env = config("--model m", {"VOLTSERVE_MAX_NUM_SEQS": "3", "VOLTSERVE_PORT": "9000"})
    line = config("--model m --max-num-seqs 4 --port 9001", {"VOLTSERVE_MAX_NUM_SEQS": "3", "VOLTSERVE_PORT": "9000"})
    assert [one.engine["max-num-seqs"] for one in (preset, env, line)] == [16, 3, 4]
    assert [one.port for one in (preset, env, line)] == [8000, 9000, 9001]


def test_each_value_says_where_it_came_from() -> None:
    sources = config("--model m --port 1", {"VOLTSERVE_DRAIN_TIMEOUT": "5", "VOLTSERVE_SEED": "1"}).sources
    assert sources["port"] == "command line"
    assert sources["drain-timeout"] == "environment VOLTSERVE_DRAIN_TIMEOUT"
    assert sources["seed"] == "environment VOLTSERVE_SEED"
    assert sources["dtype"] == "preset cpu-smoke"
    assert sources["host"] == "default"


def test_the_served_name_is_the_path_exactly_as_given() -> None:
    assert config("--model ./models//x/").served_model_name == ("./models//x/",)
    assert config("--model m --served-model-name a b").served_model_name == ("a", "b")
    assert config("--model m", {"VOLTSERVE_SERVED_MODEL_NAME": "a b"}).served_model_name == ("a", "b")


def test_the_reference_command_line_works_as_written() -> None:
    merged = config(
        "--model /models/quasar-nvfp4 --tensor-parallel-size 2 --dtype float16 --quantization quasarnvfp4 "
        "--max-model-len 8192 --gpu-memory-utilization 0.90 --max-num-seqs 32 --enforce-eager --disable-log-requests",
        devices=PAIR,
    )
    assert merged.preset == "v100x2-16g-pcie"
    assert merged.gpus_needed == 2
    assert merged.engine == {
        "tensor-parallel-size": 2,
        "dtype": "float16",
        "quantization": "quasarnvfp4",
        "max-model-len": 8192,
        "gpu-memory-utilization": 0.9,
        "max-num-seqs": 32,
        "enforce-eager": True,
        "disable-uvicorn-access-log": True,
    }
    assert "--disable-log-requests" in {decision.what for decision in merged.decisions}


def test_the_preset_is_picked_by_the_devices_or_by_name() -> None:
    assert config("--model m").preset == "cpu-smoke"
    assert config("--model m", devices=PAIR).preset == "v100x2-16g-pcie"
    assert config("--model m --preset cpu-smoke", devices=PAIR).preset == "cpu-smoke"
    assert config("--model m", {"VOLTSERVE_PRESET": "v100x2-16g-pcie"}).preset == "v100x2-16g-pcie"


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("", {}, "no model given"),
        ("--model m --preset v100x2-16g-pci", {}, "did you mean v100x2-16g-pcie"),
        ("--model m --port http", {}, r"--port \(command line\).*got 'http'"),
        ("--model m --port 70000", {}, "--port"),
        ("--model m", {"VOLTSERVE_PORT": "http"}, r"--port \(environment VOLTSERVE_PORT\)"),
        (
            "--model m",
            {"VOLTSERVE_SERVICE_HOST": "10.0.0.1"},
            "VOLTSERVE_SERVICE_HOST: Kubernetes sets it for a Service",
        ),
        ("--model m", {"VOLTSERVE_PORT_8000_TCP_ADDR": "10.0.0.1"}, "enableServiceLinks: false"),
        ("--model m", {"VOLTSERVE_SERVICE_PORT_OPENAI": "8000"}, "enableServiceLinks: false"),
        ("--model m", {"VOLTSERVE_PORT": ""}, "VOLTSERVE_PORT: .*set but empty"),
        (
            "--model m",
            {"VOLTSERVE_PROT": "1"},
            "unknown environment variable 'VOLTSERVE_PROT'; did you mean VOLTSERVE_PORT",
        ),
        ("--model m", {"VOLTSERVE_ENFORCE_EAGER": "maybe"}, "VOLTSERVE_ENFORCE_EAGER"),
        ("--model m --log-level loud", {}, "--log-level"),
        ("--model m --drain-timeout -1", {}, "--drain-timeout"),
    ],
)
def test_a_malformed_setting_is_fatal_and_named(line: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(line, environ)


@pytest.mark.parametrize("flag", ["--uds x", "--api-key k", "--ssl-keyfile f", "--root-path /x", "--headless"])
def test_flags_that_the_gateway_owns_are_refused_with_the_reason(flag: str) -> None:
    with pytest.raises(ConfigError, match="is not for users of voltserve: "):
        config(f"--model m {flag}")


def test_listening_beyond_loopback_is_a_decision() -> None:
    assert not [one for one in config("--model m").decisions if one.what == "listening"]
    assert [one.choice for one in config("--model m --host 0.0.0.0").decisions if one.what == "listening"]


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("::", False)]
)
def test_loopback_is_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_absent_openmp_library_is_a_decision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    without = config("--model m")
    assert "LD_PRELOAD" not in without.env
    assert [one.choice for one in without.decisions if one.what == "LD_PRELOAD"] == ["not set"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert config("--model m").env["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_ranks_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("presets", "settings"):
        monkeypatch.setattr(f"server.config.{module}.usable_cores", lambda: 5)
    alone, two, many = (config(f"--model m {flags}") for flags in ("", "-tp 2", "-tp 4 -pp 2"))
    assert [one.env["OMP_NUM_THREADS"] for one in (alone, two, many)] == ["5", "2", "1"]
    told = [[str(made) for made in one.decisions if made.what == "OMP_NUM_THREADS"] for one in (alone, two, many)]
    assert told[:2] == [[], ["OMP_NUM_THREADS: 2 (5 cores shared by 2 ranks)"]]
    assert len(told[2]) == 1
    assert config("--model m -tp 2", devices=PAIR, cpu_engine=False).env.get("OMP_NUM_THREADS") is None


def test_the_cpu_build_leaves_gpus_alone() -> None:
    merged = config("--model m", devices=PAIR, cpu_engine=True)
    assert merged.preset == "cpu-smoke"
    assert "CPU build" in merged.decisions[0].reason


def test_unused_cards_are_a_warning_unless_the_preset_was_asked_for_or_no_engine_would_use_them() -> None:
    told = costly(config("--model m", devices=PAIR, cpu_engine=True).decisions)
    assert len(told) == 1
    assert "Tesla V100-PCIE-16GB" in told[0]
    assert "make setup ENGINE=gpu" in told[0]
    other = Devices((Device("NVIDIA A100", "GPU-9", "8.0", 40, nvlink=False),))
    for quiet in (
        config("--model m", devices=PAIR, cpu_engine=False),
        config("--model m", devices=NONE, cpu_engine=True),
        config("--model m", devices=other, cpu_engine=True),
        config("--model m --preset cpu-smoke", devices=PAIR, cpu_engine=True),
    ):
        assert not costly(quiet.decisions)


def test_explain_shows_the_warning(tmp_path: Path) -> None:
    explained = explain(config(f"--model {tmp_path}", devices=PAIR, cpu_engine=True))
    assert explained["warnings"] == costly(config("--model m", devices=PAIR, cpu_engine=True).decisions)
    assert f"WARNING: {explained['warnings'][0]}" in as_text(explained)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config("--model m").port = 1


def test_only_these_settings_share_a_name_with_a_flag_of_vllm() -> None:
    assert set(setting_flags()) & set(engine_flags()) == {"model", "host", "port", "served-model-name"}
    assert set(all_flags()) >= set(engine_flags())


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
