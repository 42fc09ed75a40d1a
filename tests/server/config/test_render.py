import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from server.config.devices import Device, Devices
from server.config.presets import load_presets
from server.config.render import overridden, render_launch
from server.config.settings import load_config

NONE = Devices((), "no driver")


def test_the_command_has_the_model_the_socket_the_names_and_the_flags() -> None:
    config = load_config(["--model", "m/", "--max-model-len", "8192", "--no-enforce-eager"], {}, lambda: NONE)
    argv = render_launch(config, Path("/run/x"), {}).argv
    assert argv[:9] == (sys.executable, "-m", "engine", "--model", "m/", "--uds", "/run/x/engine.sock", *argv[7:9])
    assert argv[7:9] == ("--served-model-name", "m/")
    assert "--no-enforce-eager" in argv
    assert argv[argv.index("--max-model-len") + 1] == "8192"


def test_the_engine_s_environment_holds_no_secret_and_nothing_unlisted() -> None:
    environ = {
        "PATH": "/bin",
        "HF_TOKEN": "s",
        "VLLM_API_KEY": "s",
        "VLLM_SECRET": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OPENAI_API_KEY": "s",
        "VOLTSERVE_PORT": "1",
        "NCCL_DEBUG": "INFO",
        "LD_PRELOAD": "/evil.so",
    }
    config = load_config(["--model", "m"], {}, lambda: NONE)
    env = render_launch(config, Path("/run/x"), environ).env
    assert "s" not in env.values()
    assert "VOLTSERVE_PORT" not in env
    assert env["PATH"] == "/bin"
    assert env["NCCL_DEBUG"] == "INFO"
    assert env.get("LD_PRELOAD") == config.env.get("LD_PRELOAD")
    assert env["VOLTSERVE_PROGRESS_SOCKET"] == "/run/x/progress.sock"
    assert env["VLLM_RPC_BASE_PATH"] == "/run/x"


def test_the_engine_neither_fetches_nor_reports() -> None:
    config = load_config(["--model", "m"], {}, lambda: NONE)
    env = render_launch(config, Path("/run/x"), {"VLLM_NO_USAGE_STATS": "0", "HF_HUB_OFFLINE": "0"}).env
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"]) == ("1", "1", "1")


def test_the_engine_closes_no_idle_connection_whatever_the_environment_says() -> None:
    config = load_config(["--model", "m"], {}, lambda: NONE)
    env = render_launch(config, Path("/run/x"), {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5"}).env
    assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 24 * 3600


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--enforce-eager", "1"),
        ("--no-enforce-eager", None),
        ("--preset v100x2-16g-pcie", None),
        ("--preset v100x2-16g-pcie-graphs", None),
    ],
)
def test_dynamo_is_off_where_nothing_is_compiled_or_recorded_unless_the_user_says_so(
    flags: str, expected: str | None
) -> None:
    config = load_config(["--model", "m", *flags.split()], {}, lambda: NONE)
    assert render_launch(config, Path("/run/x"), {}).env.get("TORCH_COMPILE_DISABLE") == expected
    assert render_launch(config, Path("/run/x"), {"TORCH_COMPILE_DISABLE": "0"}).env["TORCH_COMPILE_DISABLE"] == "0"


@pytest.mark.parametrize("preset", sorted(name for name in load_presets() if name.startswith("v100")))
def test_every_preset_of_v100s_records_steps(preset: str) -> None:
    """Eagerly and for graphs: what the engine then fuses is not in the model's own modules."""
    config = load_config(["--model", "m", "--preset", preset], {}, lambda: NONE)
    assert "TORCH_COMPILE_DISABLE" not in render_launch(config, Path("/run/x"), {}).env


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--enforce-eager", "1"),
        ("--no-enforce-eager", "1"),
        ("--no-enforce-eager --compilation-config.mode 3", None),
        ("--no-enforce-eager --volta force", None),
    ],
)
def test_other_gpus_compile_only_if_asked_for(flags: str, expected: str | None) -> None:
    newer = Devices((Device("NVIDIA H200", "GPU-1", "9.0", 141, nvlink=False),))
    config = load_config(["--model", "m", "--preset", "v100x1-32g", *flags.split()], {}, lambda: newer)
    assert render_launch(config, Path("/run/x"), {}).env.get("TORCH_COMPILE_DISABLE") == expected


def test_a_variable_of_the_user_s_beats_the_preset_s_and_is_a_decision() -> None:
    config = load_config(["--model", "m", "--preset", "v100x2-16g-pcie"], {}, lambda: NONE)
    environ = {"NCCL_P2P_DISABLE": "0"}
    assert render_launch(config, Path("/run/x"), {}).env["NCCL_P2P_DISABLE"] == "1"
    assert render_launch(config, Path("/run/x"), environ).env["NCCL_P2P_DISABLE"] == "0"
    assert [(one.what, one.choice) for one in overridden(config, environ)] == [("NCCL_P2P_DISABLE", "0")]
    assert overridden(config, {}) == []


def test_treating_any_gpu_as_a_v100_reaches_the_engine_only_where_asked_for() -> None:
    for flags, expected in (([], None), (["--volta", "auto"], None), (["--volta", "force"], "1")):
        config = load_config(["--model", "m", *flags], {}, lambda: NONE)
        assert render_launch(config, Path("/run/x"), {}).env.get("VOLTSERVE_FORCE_VOLTA") == expected


def test_an_engine_over_ray_finds_its_cluster_and_has_no_loopback_address() -> None:
    environ = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_JOB_ID": "1", "RAY_AUTH_TOKEN": "x", "GLOO_SOCKET_IFNAME": "eth1"}

    def environment(backend: str) -> Mapping[str, str]:
        flags = ["--preset", "cpu-smoke", "--pipeline-parallel-size", "2", "--distributed-executor-backend", backend]
        return render_launch(load_config(["--model", "m", *flags], {}, lambda: NONE), Path("/run/x"), environ).env

    env = environment("ray")
    assert (env["RAY_ADDRESS"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1:6379", "eth1")
    assert not {"VLLM_HOST_IP", "RAY_JOB_ID", "RAY_AUTH_TOKEN"} & env.keys()
    env = environment("mp")
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert not {"RAY_ADDRESS", "GLOO_SOCKET_IFNAME"} & env.keys()
