"""What scripts/gpu_e2e/ carries to a GPU machine arrives there unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.gpu_e2e import pack, unpack


def test_a_model_is_the_same_after_the_journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(-127, 128, (6, 64), generator=torch.Generator().manual_seed(1)).float()
    codes.view(-1, 32)[:, 0] = 127  # each block of a Q8_0 GGUF has its largest value there
    scale = torch.rand(12, 1, generator=torch.Generator().manual_seed(2)).half()
    embedding = (codes.view(-1, 32) * scale.float()).half().view(6, 64)
    source, folder, parts = (tmp_path / name for name in ("source", "folder", "parts"))
    for path in (source, folder, parts):
        path.mkdir()
    tensors = {pack.EMBEDDING: embedding, "other": torch.arange(5)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    pack.lay_out_model(source, folder)
    pack.archive(folder, parts / "whole")
    data = (parts / "whole").read_bytes()
    (parts / "model.00").write_bytes(data[:100])
    (parts / "model.01").write_bytes(data[100:])
    monkeypatch.setattr(sys, "argv", ["unpack.py", str(parts), str(tmp_path / "there")])
    unpack.main()
    arrived = load_file(tmp_path / "there" / "model.safetensors")
    assert set(arrived) == set(tensors)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["config.json", "model.safetensors"]


def test_an_embedding_that_would_not_arrive_exactly_is_refused(tmp_path: Path) -> None:
    save_file({pack.EMBEDDING: torch.randn(2, 64).half()}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="expected values of a Q8_0 GGUF"):
        pack.lay_out_model(tmp_path, tmp_path)
