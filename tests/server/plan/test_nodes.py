"""A model split over machines."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from lookalikes.public_models import dense
from server.plan import plan_for
from server.plan.memory import make_plan
from server.plan.nodes import NO_STAGES, lay_over_nodes, obstacle
from server.plan.weights import Split

from .models import model
from .test_memory import CARD, RUN
from .test_model import write
from .test_plan import config

TWO_NODES = ("--preset", "v100x2-16g-pcie-2nodes")


def test_each_machine_holds_its_layers_and_their_cache() -> None:
    qwen = model("72B")
    plan = make_plan(qwen, CARD, replace(RUN, length=4096), Split(2, 2))
    stages = lay_over_nodes(qwen, plan).stages
    assert [(stage.first, stage.last, stage.gpus) for stage in stages] == [(0, 39, 2), (40, 79, 2)]
    # 8 KV heads over 2 ranks, 128 wide, keys and values, in 2 bytes.
    assert {stage.cache_bytes_per_token for stage in stages} == {40 * 2 * 4 * 128 * 2}
    assert max(stage.weights_bytes for stage in stages) == sum(item.bytes for item in plan.items[:2])


def test_every_rank_sends_hidden_state_and_residual_of_every_token() -> None:
    qwen = model("72B")
    run = replace(RUN, length=4096, sequences=15, batched=2048, dtype_bytes=2)
    nodes = lay_over_nodes(qwen, make_plan(qwen, CARD, run, Split(2, 2)))
    assert nodes.token_bytes == 2 * 2 * 8192 * 2
    assert [(step.name, step.tokens) for step in nodes.steps] == [
        ("decode, 1 token", 1), ("decode", 8), ("prefill", 2048),
    ]  # fmt: skip
    assert nodes.steps[2].seconds(10) == pytest.approx(2048 * 65536 * 8 / 10e9)


def test_the_plan_of_a_preset_over_machines_shows_them(tmp_path: Path) -> None:
    shape, entries = dense("72B")
    planned = plan_for(config(write(tmp_path, shape, {"a.safetensors": entries}, index=False), *TWO_NODES))
    assert planned.plan.fits
    assert planned.as_dict()["nodes"]["token_bytes"] == 65536
    text = planned.as_text()
    assert "machines, one per pipeline stage:" in text
    assert "over the network, 65,536 B a token (2 ranks" in text


def test_stages_on_one_machine_cross_no_network(tmp_path: Path) -> None:
    shape, entries = dense("32B")
    directory = write(tmp_path, shape, {"a.safetensors": entries}, index=False)
    planned = plan_for(config(directory, "--preset", "v100x2-16g-pcie", "--pipeline-parallel-size", "2"))
    assert planned.as_dict()["nodes"] is None


def test_a_machine_needs_gpus_for_its_own_stage_only(tmp_path: Path) -> None:
    assert config(tmp_path, *TWO_NODES).gpus_needed == 2
    assert config(tmp_path, "--preset", "v100x2-16g-pcie", "--pipeline-parallel-size", "2").gpus_needed == 4


def test_what_cannot_be_cut_into_stages_is_refused_with_the_reason(tmp_path: Path) -> None:
    qwen = model("8B")
    assert obstacle(qwen, Split(2, 4)) == ""
    assert "expected a layer for every stage, got 36 layers; lower it to 36" in obstacle(qwen, Split(1, 37))
    shape, entries = dense("72B", architectures=["HrmTextForCausalLM"])
    planned = plan_for(config(write(tmp_path, shape, {"a.safetensors": entries}, index=False), *TWO_NODES))
    assert "HrmTextForCausalLM cannot be cut into stages" in planned.plan.problems[0]


def test_the_classes_without_stages_are_those_of_the_installed_vllm() -> None:
    assert set(_without_stages()) == NO_STAGES


def _without_stages() -> Iterator[str]:
    """Architectures of vLLM's registry without SupportsPP among their bases: read, not imported."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    vllm = Path(spec.submodule_search_locations[0])
    folder = vllm / "model_executor/models"
    bases: dict[tuple[str, str], list[str]] = {}
    for path in (*folder.glob("*.py"), *(vllm / "models").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases[path.stem, node.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    for kind in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
        for architecture, (module, name) in _registry(folder / "registry.py", kind).items():
            if not _supports_stages(module, name, bases):
                yield architecture


def _registry(path: Path, kind: str) -> Mapping[str, tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == kind:
            found: Mapping[str, tuple[str, str]] = ast.literal_eval(node.value)
            return found
    raise AssertionError(f"{path} has no {kind}")


def _supports_stages(module: str, name: str, bases: Mapping[tuple[str, str], list[str]]) -> bool:
    if name == "SupportsPP":
        return True
    homes = [module] if (module, name) in bases else [home for home, known in bases if known == name]
    return any(_supports_stages(home, base, bases) for home in homes for base in bases[home, name] if base != name)
