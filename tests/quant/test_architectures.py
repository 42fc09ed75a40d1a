import subprocess
import sys
from pathlib import Path

import pytest

from quant import architectures

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_the_architectures_file_is_what_the_installed_vllm_registers() -> None:
    command = [sys.executable, "scripts/engine_architectures.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Gemma4ForCausalLm", ["Gemma4ForCausalLM"]),
        ("Qwen3VLForConditionalGenerations", ["Qwen3VLForConditionalGeneration"]),
        ("LlamaForCausalLm", ["LlamaForCausalLM"]),
        ("MixtrallForCausalLM", ["MixtralForCausalLM"]),
    ],
)
def test_the_nearest_names_are_known(name: str, nearest: list[str]) -> None:
    found = list(architectures.nearest(name))
    assert found[: len(nearest)] == nearest
    assert len(found) <= 2


def test_one_known_name_is_enough() -> None:
    assert architectures.judge(["OwnModel", "LlamaForCausalLM"]) is None
    assert architectures.judge(["OwnModel"]) is not None


def test_experts_are_named_as_vllm_reads_them() -> None:
    assert architectures.expert_names(["MixtralForCausalLM"]) == (("w1", "w2", "w3"),)
    assert architectures.expert_names(["Qwen3MoeForCausalLM"]) == (("gate_proj", "down_proj", "up_proj"),)
    assert architectures.expert_names(None) == architectures.expert_names(["LlamaForCausalLM"]) == ()
