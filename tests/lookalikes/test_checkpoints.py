"""Random checkpoints of known shapes are models that verify accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lookalikes import decoder_checkpoints, hybrid_checkpoint, quasar
from lookalikes.quasar_config import SMALL
from quant.verify.report import verify


@pytest.mark.parametrize("name", ["qwen3-32b", "moe"])
def test_a_synthetic_checkpoint_is_a_valid_model(tmp_path: Path, name: str) -> None:
    shape = decoder_checkpoints.SHAPES[name]
    small = replace(shape, hidden=128, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=32, vocabulary=64)
    small = replace(small, experts=min(shape.experts, 2))
    written = decoder_checkpoints.write(small, tmp_path)
    assert written == sum(
        tensor.nbytes for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values()
    )
    errors = [str(finding) for finding in verify(tmp_path).findings if finding.severity == "error"]
    assert all("tokenizer" in error for error in errors)  # trials ask with token ids, or bring SmolLM2's


def test_the_synthetic_27b_has_the_lookalikes_tensors(tmp_path: Path) -> None:
    sizes = replace(SMALL, layers=4)
    written = hybrid_checkpoint.write(sizes, tmp_path / "synthetic")
    quasar.write(tmp_path / "lookalike", sizes)

    def tensors(folder: str) -> dict[str, tuple[str, list[int]]]:
        found = {}
        for path in (tmp_path / folder).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found[name] = (str(tensor.dtype), list(tensor.shape))
        return found

    made, expected = tensors("synthetic"), tensors("lookalike")
    left_out = ("model.visual.", ".input_global_scale")
    assert made == {
        name: what
        for name, what in expected.items()
        if not name.startswith(left_out[0]) and not name.endswith(left_out[1])
    }
    assert written == sum(path.stat().st_size for path in (tmp_path / "synthetic").glob("*.safetensors")) - sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in (tmp_path / "synthetic").glob("*.safetensors")
    )
