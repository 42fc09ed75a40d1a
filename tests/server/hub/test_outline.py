"""plan, verify and inspect of a model on a hub: by range requests, bounded and shown; answers as of a directory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from quant.verify.outline import FILE_NAME as MARK
from server.hub import outline as outlines
from server.plan import settings
from server.units import GIB
from tests.fakes.hub import Fault, Hub, Repository
from tests.quant.checkpoints import (
    COMPRESSED_TENSORS,
    CONFIG,
    LINEARS,
    compressed_tensors_linear,
    safetensors_bytes,
    write_model,
)

from .conftest import NAME, model_on, run

SHARD = "model-00001-of-00002.safetensors"
MODEL = f"hf:{NAME}@{'1' * 40}"


@pytest.fixture
def complete(hub: Hub) -> Hub:
    """The model with what plan needs, too."""
    config = json.loads(model_on(hub)["config.json"]) | {"max_position_embeddings": 4096}
    model_on(hub)["config.json"] = json.dumps(config).encode()
    return hub


@pytest.mark.parametrize("kind", ["hf", "modelscope", "url"])
@pytest.mark.parametrize(
    "command",
    [["verify", "--headers"], ["inspect"], ["plan", "--preset", "cpu-smoke", "--max-model-len", "1024"]],
    ids=lambda command: command[0],
)
def test_a_model_on_a_hub_is_judged_as_its_directory_is(
    complete: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: list[str]
) -> None:
    monkeypatch.setattr(settings, "available_memory", lambda _: 8 * GIB)
    source = f"{complete.url}/plain/{NAME}/" if kind == "url" else f"{kind}:{NAME}"
    run("model", "fetch", source, tmp_path / "model")
    here = run(command[0], tmp_path / "model", *command[1:])
    there = run(command[0], source, *command[1:])
    assert here[0] == there[0] == 0
    assert "configs and headers, no weight" in there[1]
    shown = {"hf": MODEL, "modelscope": f"modelscope:{NAME}@master", "url": source}[kind]
    expected = [line.replace(str(tmp_path / "model"), shown) for line in here[1].splitlines()]
    assert [line for line in there[1].splitlines() if "requests: configs" not in line] == expected
    assert "voltserve-outline" not in there[1]


def test_no_weight_is_asked_for(complete: Hub) -> None:
    assert run("verify", f"hf:{NAME}")[0] == 0
    shards = [line for line in complete.requests if "X-Amz" in line]
    assert shards
    assert all("bytes=" in line for line in shards)
    whole = sum(map(len, model_on(complete).values()))
    assert complete.sent < whole / 2


def test_json_names_the_model_too(complete: Hub) -> None:
    code, out = run("inspect", "--json", f"hf:{NAME}")
    assert code == 0
    assert json.JSONDecoder().raw_decode(out[out.index("{") :])[0]["directory"] == MODEL


def test_a_refused_model_is_refused_before_it_is_fetched(hub: Hub) -> None:
    config = json.loads(model_on(hub)["config.json"]) | {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    model_on(hub)["config.json"] = json.dumps(config).encode()
    for command in (["verify", "--device", "v100"], ["plan", "--preset", "v100x2-16g-pcie"]):
        code, out = run(command[0], f"hf:{NAME}", *command[1:])
        assert code == 65
        assert "FP8, 8-bit float weights" in out
        assert "voltserve-outline" not in out


def many_shards(layers: int) -> Repository:
    """A model with a shard for each linear, of which a layer has seven."""
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in LINEARS.items():
            linear = f"model.layers.{layer}.{name}"
            tensors[linear] = compressed_tensors_linear(linear, rows, columns)
    files, weight_map = {}, {}
    for number, shard in enumerate(tensors.values(), 1):
        name = f"model-{number:05}-of-{len(tensors):05}.safetensors"
        files[name] = safetensors_bytes(shard)
        weight_map |= dict.fromkeys(shard, name)
    config = {**CONFIG, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    config["quantization_config"] = COMPRESSED_TENSORS
    return Repository(
        {
            **files,
            "config.json": json.dumps(config).encode(),
            "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
            "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}' + b" " * (20 << 20),
        }
    )


def test_a_model_of_a_thousand_shards_is_planned_within_20_megabytes(hub: Hub) -> None:
    hub.repositories["owner/large"] = many_shards(143)
    code, out = run("plan", "hf:owner/large", "--preset", "cpu-smoke")
    assert code == 0, out
    assert "143 layers (143 full), 1001 linears in 4 bits" in out
    assert 1_000_000 < hub.sent < 20_000_000
    shards = [line for line in hub.requests if "X-Amz" in line]
    assert 1001 <= len(shards) <= 2002


HEADERS = {
    "a length beyond every reader": struct.pack("<Q", 1 << 62) + b"{",
    "a length beyond the file": struct.pack("<Q", 90_000_000) + b"{" * 9000,
    "a length of nothing": struct.pack("<Q", 0),
    "no length": b"abc",
    "nothing": b"",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS.keys())
def test_a_hostile_header_is_refused_and_costs_little(hub: Hub, data: bytes) -> None:
    model_on(hub)[SHARD] = data
    for command in ("verify", "inspect"):
        code, out = run(command, f"hf:{NAME}")
        assert code in (0, 65)
        assert code == 65 or "problems" in out
    assert hub.sent < 200_000


def test_headers_beyond_the_bound_are_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "MOST_BYTES", 100_000)
    header = b'{"__metadata__": {"a": "' + b"x" * 3_000_000 + b'"}}'
    model_on(hub)[SHARD] = struct.pack("<Q", len(header)) + header
    code, out = run("verify", f"hf:{NAME}")
    assert code == 69
    assert "expected headers and configs within 0.1 MB, got 3.0 MB" in out
    assert hub.sent < 200_000


@pytest.mark.parametrize(
    "fault",
    [Fault(ignore_range=True), Fault(resize=-100), Fault(resize=100), Fault(cut=5), Fault(404), Fault(page=True)],
    ids=str,
)
def test_a_hub_that_does_not_keep_to_its_list_is_named(hub: Hub, fault: Fault) -> None:
    hub.always[SHARD] = fault
    code, out = run("verify", f"hf:{NAME}")
    if fault.ignore_range:  # the first bytes come all the same; no more than those are read
        assert code in (0, 65, 69)
    else:
        assert code == 69
        assert "voltserve: " in out
    assert "Traceback" not in out


def test_a_config_that_is_not_the_lists_is_refused(hub: Hub) -> None:
    hub.always["config.json"] = Fault(flip=True)
    code, out = run("verify", f"hf:{NAME}")
    assert code == 69
    assert "config.json: expected Git's id" in out


def test_an_outline_takes_no_room_and_is_gone_afterwards(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    from server.hub.source import parse_source

    with outlines.outline(parse_source(f"hf:{NAME}")) as made:
        assert made.directory.is_relative_to(tmp_path)
        assert (made.directory / MARK).exists()
        names = {path.name for path in made.directory.iterdir()} - {MARK}
        assert names == model_on(hub).keys()
        assert {name: (made.directory / name).stat().st_size for name in names} == {
            name: len(data) for name, data in model_on(hub).items()
        }
    assert not list(tmp_path.glob("voltserve-*"))


def test_a_manifest_is_not_written_for_a_hub(hub: Hub) -> None:
    assert run("verify", "--write-manifest", f"hf:{NAME}")[0] == 2


def test_a_directory_is_still_a_directory(tmp_path: Path) -> None:
    assert run("verify", write_model(tmp_path / "model"))[0] == 0
