"""The speed of attention on a V100, computed from its machine code."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from perfmodel.attention_model import Model, prompt, triton_prefill
from perfmodel.sass_model import GPUS

PCIE = GPUS["v100-pcie"]


@pytest.mark.parametrize(("head_dim", "least"), [(128, 50), (256, 50)])
def test_a_v100_should_reach_50_tflops_on_a_long_prompt(model: Model, head_dim: int, least: float) -> None:
    row = prompt(PCIE, model.prefill(head_dim), (32, 4, head_dim), 2048, 6144)
    assert row["tflop_s"] >= least


@pytest.mark.skipif(find_spec("triton") is None, reason="torch's CPU build comes without triton")
@pytest.mark.parametrize("head_dim", [128, 256])
def test_prompts_should_take_a_fifth_of_tritons_time_on_a_v100(
    model: Model, cuda_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head_dim: int
) -> None:
    """Triton has no tensor cores on sm_70; its machine code is judged by the same model."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    package = find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    theirs = triton_prefill(Path(package.submodule_search_locations[0]), head_dim, 8, cuda_home)
    assert theirs.count("HMMA") == 0
    times = [prompt(PCIE, kernel, (32, 4, head_dim), 2048, 6144)["us"] for kernel in (model.prefill(head_dim), theirs)]
    assert 5 * times[0] <= times[1]
