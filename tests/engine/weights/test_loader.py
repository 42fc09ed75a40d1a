from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine import progress
from engine.weights import loader


class Reader(nn.Module):
    """A model that takes every tensor; `fails_at` names one it cannot take."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.fails_at = fails_at

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        names = set()
        for name, _ in weights:
            if name == self.fails_at:
                raise RuntimeError(name)
            names.add(name)
        return names


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_send", messages.append)
    monkeypatch.setattr(progress, "MIN_INTERVAL", 0.0)
    return messages


def write_shards(directory: Path) -> int:
    """Two shards and their index; returns the bytes of the files."""
    first, second = {"a": torch.zeros(100), "b": torch.zeros(50)}, {"c": torch.zeros(7)}
    shards = {"model-1.safetensors": first, "model-2.safetensors": second}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum((directory / file).stat().st_size for file in shards)


def test_bytes_are_told_by_shard_up_to_the_whole(tmp_path: Path, told: list[dict[str, Any]], load: Any) -> None:
    size = write_shards(tmp_path)
    load(tmp_path, Reader())
    told = [message for message in told if message["event"] == "progress"]  # registering reports decisions
    assert [(message["done"], message["file"]) for message in told] == [
        (400, "model-1.safetensors"),
        (600, "model-1.safetensors"),
        (628, "model-2.safetensors"),
        (size, ""),
    ]
    assert {message["total"] for message in told} == {size}


def test_a_single_file_is_named_without_an_index(tmp_path: Path, told: list[dict[str, Any]], load: Any) -> None:
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    load(tmp_path, Reader())
    assert told[0]["file"] == "model.safetensors"


def test_consolidated_files_beside_others_are_not_loaded(tmp_path: Path, load: Any) -> None:
    for file in ("model.safetensors", "consolidated.safetensors"):
        save_file({file.partition(".")[0]: torch.zeros(10)}, tmp_path / file)
    names: list[str] = []

    class Keeper(Reader):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            names.extend(name for name, _ in weights)
            return set(names)

    load(tmp_path, Keeper())
    assert names == ["model"]


def test_a_tensor_counts_once_the_model_has_taken_it(tmp_path: Path, told: list[dict[str, Any]], load: Any) -> None:
    write_shards(tmp_path)
    with pytest.raises(RuntimeError, match="b"):
        load(tmp_path, Reader(fails_at="b"))
    assert [message["done"] for message in told] == [400]


def test_weights_that_vllm_packed_for_onednn_are_held_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 8, bias=False))
    loaded = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    model[0].weight = torch.nn.Parameter(torch.empty(0))
    assert loader.bytes_held(model, loaded) == 2 * 4 * 8 * 4


def test_tied_weights_are_held_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    assert loader.bytes_held(model, {}) == 2 * 10 * 4 * 4
    model[1].weight = model[0].weight
    assert loader.bytes_held(model, {}) == 10 * 4 * 4
