from pathlib import Path

import pytest

from server.config.devices import Device, Devices
from server.config.engines_file import load_configs
from server.config.render import render_launch
from server.config.settings import Config
from server.errors import ConfigError

GPUS = Devices(tuple(Device("Tesla V100-PCIE-16GB", f"GPU-{index}", "7.0", 16, nvlink=False) for index in range(4)))
NONE = Devices((), "no NVIDIA driver")

TWO = """
schema: 1
models:
  - name: qwen
    flags: {model: /m/qwen, served-model-name: [qwen, big], max-model-len: 4096, max-in-flight: 7}
    replicas: [{gpus: [0, 1]}, {gpus: [3, 2]}]
"""
BOTH = """
schema: 1
models:
  - name: a
    flags: {model: /m/a, served-model-name: [a]}
  - name: b
    flags: {model: /m/b, served-model-name: [b]}
"""


def load(tmp_path: Path, text: str, *flags: str, devices: Devices = NONE, **environ: str) -> tuple[Config, ...]:
    file = tmp_path / "engines.yaml"
    file.write_text(text)
    return load_configs(["--engines", str(file), *flags], environ, lambda: devices)


def test_without_a_file_there_is_one_engine_without_a_name() -> None:
    (config,) = load_configs(["--model", "m"], {}, lambda: NONE)
    assert (config.name, config.pinned) == ("", False)


def test_each_replica_has_its_gpus_and_the_model_s_flags(tmp_path: Path) -> None:
    # The CPU build that tests run on takes no GPU's preset by itself.
    first, second = load(
        tmp_path, TWO, "--preset", "v100x2-16g-pcie", "--port", "9", "--max-model-len", "1", devices=GPUS
    )
    assert (first.name, second.name) == ("qwen-0", "qwen-1")
    assert [gpu.uuid for gpu in first.devices.gpus] == ["GPU-0", "GPU-1"]
    assert [gpu.uuid for gpu in second.devices.gpus] == ["GPU-3", "GPU-2"]
    for config in (first, second):
        assert config.model == "/m/qwen"
        assert config.served_model_name == ("qwen", "big")
        assert config.engine["max-model-len"] == 4096
        assert config.sources["max-model-len"].endswith("engines.yaml model qwen")
        assert (config.max_in_flight, config.port) == (7, 9)


def test_an_engine_sees_its_gpus_and_no_others_whatever_the_environment_says(tmp_path: Path) -> None:
    configs = load(tmp_path, TWO, devices=GPUS)
    for config, visible in zip(configs, ("GPU-0,GPU-1", "GPU-3,GPU-2"), strict=True):
        launch = render_launch(config, tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
        assert launch.env["CUDA_VISIBLE_DEVICES"] == visible


def test_one_engine_leaves_the_environment_s_gpus_alone(tmp_path: Path) -> None:
    (config,) = load_configs(["--model", "m"], {}, lambda: GPUS)
    assert render_launch(config, tmp_path, {"CUDA_VISIBLE_DEVICES": "2"}).env["CUDA_VISIBLE_DEVICES"] == "2"


def test_models_without_gpus_run_on_a_machine_without_them(tmp_path: Path) -> None:
    assert [config.name for config in load(tmp_path, BOTH)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("[", NONE, "is not YAML"),
        ("{}", NONE, "schema"),
        ("schema: 2\nmodels: []", NONE, "schema"),
        ("schema: 1\nmodels: []", NONE, "models"),
        (TWO.replace("replicas", "replica"), NONE, "models.0.replica: "),
        (TWO.replace("qwen, big", "5"), GPUS, None),
        (TWO.replace("max-model-len", "max-modle-len"), GPUS, "did you mean max-model-len"),
        (TWO.replace("4096", "many"), GPUS, "max-model-len: expected a count"),
        (TWO.replace("max-in-flight", "port"), GPUS, "port is the gateway's"),
        (TWO.replace("max-in-flight: 7", "uds: x"), GPUS, "--uds"),
        (TWO.replace("[3, 2]", "[1, 2]"), GPUS, "GPU 1 is given twice"),
        (TWO.replace("[3, 2]", "[4, 2]"), GPUS, "no GPU 4; found 4"),
        (TWO.replace("[3, 2]", "[-1]"), GPUS, "models.0.replicas.1.gpus.0"),
        (TWO.replace("[3, 2]", "[]"), GPUS, "models.0.replicas.1.gpus"),
        (TWO, NONE, "no GPU 0; found 0: no NVIDIA driver"),
        (BOTH, GPUS, "a replica without gpus"),
        (BOTH.replace("name: b", "name: a"), NONE, "two models of one name"),
        (BOTH.replace("[b]", "[a]"), NONE, "both /m/a and /m/b are served as 'a'"),
        (BOTH.replace("name: a\n", "name: a b\n"), NONE, "models.0.name"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    tmp_path: Path, text: str, devices: Devices, message: str | None
) -> None:
    if message is None:
        assert load(tmp_path, text, devices=devices)
        return
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, devices=devices)
    assert message in str(caught.value)
    assert "engines.yaml" in str(caught.value)


SHARED = """
schema: 1
models:
  - name: a
    flags: {model: /m/a, served-model-name: [a]}
    replicas: [{gpus: [0, 1]}]
    on_demand: true
    idle_timeout: 600
  - name: b
    flags: {model: /m/b, served-model-name: [b]}
    replicas: [{gpus: [1]}]
    on_demand: true
  - name: c
    flags: {model: /m/c, served-model-name: [c]}
    replicas: [{gpus: [2]}]
"""
ON_CPU = BOTH.replace("[a]}", "[a]}\n    on_demand: true").replace(
    "[b]}", "[b]}\n    on_demand: true\n    pinned: true"
)


def test_models_on_demand_may_share_gpus(tmp_path: Path) -> None:
    a, b, c = load(tmp_path, SHARED, devices=GPUS)
    assert a.demand is not None
    assert b.demand is not None
    assert c.demand is None
    assert a.demand.places == {"GPU 0", "GPU 1"}
    assert (a.demand.idle_timeout, b.demand.idle_timeout, b.demand.min_residence) == (600, 0, None)
    assert [b.demand.residence(start) for start in (1, 90, 900)] == [30, 90, 300]
    assert a.demand.collides(b.demand)
    assert a.decisions[-1].reason == "shares GPU 0 and GPU 1 with b; one of them runs at a time"
    assert [gpu.uuid for gpu in b.devices.gpus] == ["GPU-1"]


def test_without_gpus_models_on_demand_share_the_cpu_and_a_pinned_one_does_not(tmp_path: Path) -> None:
    a, b = load(tmp_path, ON_CPU)
    assert a.demand is not None
    assert b.demand is not None
    assert a.demand.places == {"the CPU"}
    assert not a.demand.collides(b.demand)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        (
            SHARED.replace("gpus: [2]", "gpus: [1]"),
            GPUS,
            "GPU 1 is given twice, to b and to c; only models with on_demand",
        ),
        (SHARED.replace("idle_timeout: 600", "pinned: true"), GPUS, "GPU 1 is given twice, to a and to b"),
        (SHARED.replace("[0, 1]", "[0, 0]"), GPUS, "GPU 0 is given twice, to a and to a"),
        (SHARED.replace("on_demand: true\n    idle", "idle"), GPUS, "idle_timeout is for models with on_demand: true"),
        (SHARED.replace("idle_timeout: 600", "idle_timeout: -1"), GPUS, "models.0.idle_timeout"),
        (SHARED.replace("idle_timeout: 600", "idel_timeout: 1"), GPUS, "models.0.idel_timeout"),
        (SHARED.replace("[{gpus: [0, 1]}]", "[{gpus: [0]}, {gpus: [3]}]"), GPUS, "a model on demand has one replica"),
        (ON_CPU + "    idle_timeout: 5\n", NONE, "a pinned model stays once it is started"),
        (ON_CPU.replace("/m/b, served-model-name: [b]", "/m/a, served-model-name: [a]"), NONE, "'a' is on demand at a"),
    ],
)
def test_what_on_demand_cannot_be_is_refused(tmp_path: Path, text: str, devices: Devices, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, devices=devices)
    assert message in str(caught.value)


def test_a_file_excludes_a_model_given_besides(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        load(tmp_path, TWO, "--model", "m", devices=GPUS)
    with pytest.raises(ConfigError, match="exclude each other"):
        load(tmp_path, TWO, devices=GPUS, VOLTSERVE_MODEL="m")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_configs([], {"VOLTSERVE_ENGINES": "nowhere.yaml"}, lambda: NONE)
