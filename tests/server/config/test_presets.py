from pathlib import Path

import pytest
import yaml

from server.config.devices import Device, Devices
from server.config.preset_choice import select_preset
from server.config.presets import PRESETS_FOLDER, Automatic, find_preset, load_presets, usable_cores
from server.config.settings import load_config
from server.errors import ConfigError, PreflightError

GOOD = {
    "schema": 1,
    "name": "good",
    "description": "for a test",
    "match": {"count": 1, "capability": "7.0", "memory_gib": 16, "nvlink": False},
    "engine": {"dtype": "float16"},
    "limits": {"max-num-seqs": {"value": 4, "provenance": "measured", "source": "a run"}},
    "env": {"A": "1", "B": {"cores": True}},
}


def gpu(capability: str = "7.0", memory_gib: int = 16, *, nvlink: bool = False) -> Device:
    return Device("GPU", "GPU-1", capability, memory_gib, nvlink)


def write(folder: Path, **changes: object) -> Path:
    (folder / "good.yaml").write_text(yaml.safe_dump({**GOOD, **changes}))
    return folder


def test_every_preset_in_the_repository_is_valid() -> None:
    assert {"cpu-smoke", "v100x2-16g-pcie"} <= set(load_presets())


def test_limits_are_flags_of_the_engine(tmp_path: Path) -> None:
    preset = load_presets(write(tmp_path))["good"]
    assert preset.flags() == {"dtype": "float16", "max-num-seqs": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engin": {}}, "unknown key 'engin'; did you mean engine"),
        ({"schema": 2}, "schema: "),
        ({"name": "other"}, "expected the file's, 'good'"),
        ({"match": {**GOOD["match"], "memory_gb": 1}}, "unknown key in match 'memory_gb'; did you mean memory_gib"),  # type: ignore[dict-item]
        ({"match": {"count": 1}}, "match.capability"),
        ({"engine": {"dtyp": "float16"}}, "unknown engine flag 'dtyp'; did you mean dtype"),
        ({"engine": {"dtype": "float61"}}, "unknown value 'float61'"),
        ({"engine": {"enforce-eager": "yes"}}, "expected true or false"),
        ({"engine": {"max-num-seqs": 4}}, "both under engine and under limits"),
        ({"limits": {"seed": {"value": 4, "provenance": "guessed", "source": "x"}}}, "provenance"),
        ({"limits": {"seed": {"value": 4, "provenance": "computed"}}}, "limits.seed.source"),
        (
            {"limits": {"seed": {"value": 1, "provenance": "computed", "source": "x", "sourc": 1}}},
            "did you mean source",
        ),
        ({"env": {"A": {"libary": "x"}}}, "did you mean library"),
    ],
)
def test_a_wrong_preset_names_file_key_and_nearest_valid(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_presets(write(tmp_path, **changes))
    assert "good.yaml" in str(error.value)


@pytest.mark.parametrize("nvlink", [True, False])
def test_links_do_not_matter_where_a_preset_says_so(tmp_path: Path, nvlink: bool) -> None:
    preset = load_presets(write(tmp_path, match={**GOOD["match"], "nvlink": None}))["good"]  # type: ignore[dict-item]
    assert preset.match is not None
    assert preset.match.covers([gpu(nvlink=nvlink)])


def test_a_preset_takes_what_it_does_not_say_from_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path)
    more = {
        "schema": 1,
        "name": "more",
        "extends": "good",
        "description": "more",
        "engine": {"seed": 3},
        "env": {"A": "2"},
    }
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(more))
    presets = load_presets(tmp_path)
    assert presets["more"].flags() == {"dtype": "float16", "max-num-seqs": 4, "seed": 3}
    assert presets["more"].env["A"] == "2"
    assert presets["more"].match == presets["good"].match
    assert select_preset(presets, Devices((gpu(),)), cpu_engine=False)[0].name == "good"


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("goood", "unknown preset 'goood'; did you mean good"),
        ("more", "unknown preset 'more'"),
        ("chain", "extends none"),
    ],
)
def test_a_preset_extends_another_of_its_folder_that_extends_none(tmp_path: Path, extends: str, message: str) -> None:
    write(tmp_path)
    for name, base in (("chain", "good"), ("more", extends)):
        said = {"schema": 1, "name": name, "extends": base, "description": name}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(said))
    with pytest.raises(ConfigError, match=message) as error:
        load_presets(tmp_path)
    assert "more.yaml" in str(error.value)


GRAPHS = {"description": "with graphs", "engine": {"seed": 3}, "env": {"A": "2"}}


def test_a_variant_is_a_preset_of_its_own_that_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    presets = load_presets(write(tmp_path, variants={"graphs": GRAPHS}))
    assert list(presets) == ["good-graphs", "good"]
    variant = presets["good-graphs"]
    assert (variant.description, variant.extends) == ("with graphs", "good")
    assert variant.flags() == {"dtype": "float16", "max-num-seqs": 4, "seed": 3}
    assert variant.env == {**presets["good"].env, "A": "2"}
    assert variant.match == presets["good"].match
    assert select_preset(presets, Devices((gpu(),)), cpu_engine=False)[0].name == "good"


def test_a_variant_of_a_users_own_file_is_asked_for_as_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, variants={"graphs": GRAPHS})
    assert find_preset(str(tmp_path / "good-graphs.yaml"), {}).flags()["seed"] == 3
    with pytest.raises(ConfigError, match=r"good-none\.yaml: expected a preset file"):
        find_preset(str(tmp_path / "good-none.yaml"), {})


def test_variants_are_not_inherited_and_extend_nothing_further(tmp_path: Path) -> None:
    write(tmp_path, variants={"graphs": GRAPHS})
    more = {"schema": 1, "name": "more", "extends": "good", "description": "more"}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(more))
    assert set(load_presets(tmp_path)) == {"good", "good-graphs", "more"}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({**more, "extends": "good-graphs"}))
    with pytest.raises(ConfigError, match="unknown preset 'good-graphs'; valid: good"):
        load_presets(tmp_path)


def test_two_presets_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, variants={"graphs": GRAPHS})
    (tmp_path / "good-graphs.yaml").write_text(yaml.safe_dump({**GOOD, "name": "good-graphs"}))
    with pytest.raises(ConfigError, match="two presets of the name 'good-graphs'"):
        load_presets(tmp_path)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({**GRAPHS, "engin": {}}, "unknown key in variants.graphs 'engin'; did you mean engine"),
        ({"engine": {}}, "variants.graphs.description"),
        ({**GRAPHS, "engine": {"dtyp": "float16"}}, "preset good-graphs: unknown engine flag 'dtyp'"),
        ({**GRAPHS, "engine": {"max-num-seqs": 4}}, "preset good-graphs: max-num-seqs is both"),
        ({**GRAPHS, "env": {"A": {"libary": "x"}}}, "did you mean library"),
    ],
)
def test_a_wrong_variant_names_file_key_and_nearest_valid(
    tmp_path: Path, variant: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_presets(write(tmp_path, variants={"graphs": variant}))
    assert "good.yaml" in str(error.value)


# The presets that had files of their own before `variants`: as the card's preset, with CUDA graphs.
WITH_GRAPHS = [
    *("v100x1-16g", "v100x1-32g"),
    *(f"v100x{count}-{memory}-{links}" for count in (2, 4) for memory in ("16g", "32g") for links in ("pcie", "sxm2")),
]


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_every_cards_preset_has_one_with_graphs(name: str) -> None:
    presets = load_presets()
    base, graphs = presets[name], presets[f"{name}-graphs"]
    assert graphs.flags() == {**base.flags(), "enforce-eager": False}
    assert (graphs.extends, graphs.match, graphs.env, graphs.limits) == (name, base.match, base.env, base.limits)
    about = f"as {name}, with CUDA graphs; they are compared with eager steps before the engine is ready"
    assert graphs.description == about
    assert find_preset(str(PRESETS_FOLDER / f"{name}-graphs.yaml"), {}) == graphs


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not YAML"):
        load_presets(tmp_path)


@pytest.mark.parametrize(
    ("devices", "cpu_engine", "expected"),
    [
        ([], True, "cpu-smoke"),
        ([gpu(), gpu()], False, "v100x2-16g-pcie"),
        ([gpu(), gpu()], True, "cpu-smoke"),
    ],
)
def test_the_preset_follows_from_the_devices(devices: list[Device], cpu_engine: bool, expected: str) -> None:
    found = Devices(tuple(devices), "" if devices else "no driver")
    preset, decision = select_preset(load_presets(), found, cpu_engine=cpu_engine)
    assert (preset.name, decision.choice) == (expected, expected)
    assert decision.reason


def test_a_cuda_engine_without_a_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(PreflightError, match=r"no driver here.*--gpus all.*-cpu image.*ENGINE=cpu.*--preset v100"):
        select_preset(load_presets(), Devices((), "no driver here"), cpu_engine=False)


@pytest.mark.parametrize(
    ("count", "memory_gib", "nvlink", "expected"),
    [
        (1, 16, False, "v100x1-16g"),
        (1, 16, True, "v100x1-16g"),
        (1, 32, True, "v100x1-32g"),
        (2, 16, False, "v100x2-16g-pcie"),
        (2, 16, True, "v100x2-16g-sxm2"),
        (2, 32, False, "v100x2-32g-pcie"),
        (2, 32, True, "v100x2-32g-sxm2"),
        (4, 16, False, "v100x4-16g-pcie"),
        (4, 16, True, "v100x4-16g-sxm2"),
        (4, 32, False, "v100x4-32g-pcie"),
        (4, 32, True, "v100x4-32g-sxm2"),
    ],
)
def test_number_size_and_links_of_v100s_decide(count: int, memory_gib: int, nvlink: bool, expected: str) -> None:
    presets = load_presets()
    found = Devices((gpu(memory_gib=memory_gib, nvlink=nvlink),) * count)
    preset, decision = select_preset(presets, found, cpu_engine=False)
    assert (preset.name, decision.choice) == (expected, expected)
    assert str(found.gpus[0]) in decision.reason
    covering = [one for one in presets.values() if one.match is not None and one.match.covers(found.gpus)]
    assert [one.name for one in covering if one.extends is None] == [expected]
    assert f"{expected}-graphs" in {one.name for one in covering}


@pytest.mark.parametrize("name", sorted(load_presets()))
def test_a_gpu_preset_is_safe_on_its_links(name: str) -> None:
    preset = load_presets()[name]
    if preset.match is None:
        return
    flags = preset.flags()
    assert flags["dtype"] == "float16"
    assert flags["enforce-eager"] is not name.endswith("-graphs")
    assert flags.get("tensor-parallel-size", 1) == preset.match.count
    over_pcie = preset.match.nvlink is False
    assert (preset.env.get("NCCL_P2P_DISABLE") == "1") == over_pcie
    assert "disable-custom-all-reduce" not in flags  # the engine's own choice is safe on both


@pytest.mark.parametrize(
    "devices",
    [
        [gpu(), gpu("8.0")],
        [gpu(), gpu(memory_gib=32)],
    ],
)
def test_gpus_that_no_preset_covers_are_an_error_that_lists_presets(devices: list[Device]) -> None:
    presets = {name: preset for name, preset in load_presets().items() if name in {"cpu-smoke", "v100x2-16g-pcie"}}
    with pytest.raises(ConfigError, match="--preset NAME") as error:
        select_preset(presets, Devices(tuple(devices)), cpu_engine=False)
    assert all(name in str(error.value) for name in presets)


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_v100_the_cpu_engine_or_a_trial_is_what_remains(count: int) -> None:
    with pytest.raises(ConfigError, match=r"ENGINE=cpu.*-cpu image.*--preset NAME --volta force"):
        select_preset(load_presets(), Devices((gpu("9.0", 80),) * count), cpu_engine=False)


def test_automatic_values_are_found_on_the_machine(tmp_path: Path) -> None:
    assert Automatic(cores=True, library=None).resolve(tmp_path) == str(usable_cores())
    assert Automatic(cores=None, library="libx.so").resolve(tmp_path) is None
    assert usable_cores() >= 1


def test_a_preset_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema: 1\nname: mine\ndescription: my own\nmatch: null\nengine: {max-num-seqs: 3}\n")
    assert find_preset(str(path), {}).flags() == {"max-num-seqs": 3}
    config = load_config(["--model", "m", "--preset", str(path)], {}, lambda: Devices((), "none here"))
    assert (config.preset, config.engine["max-num-seqs"]) == (str(path), 3)


def test_a_preset_file_that_is_missing_or_misspelt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: expected a preset file"):
        find_preset(str(tmp_path / "none.yaml"), {})
    with pytest.raises(ConfigError, match="did you mean cpu-smoke"):
        find_preset("cpu-smok", load_presets())
