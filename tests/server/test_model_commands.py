"""`voltserve verify`, `inspect` and `convert`, as a user runs them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from tests.quant.checkpoints import COMPRESSED_TENSORS, write_model
from tests.quant.lookalikes import compressed_tensors_linear, fp8, write


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_verify_ends_with_the_verdict_and_0(tmp_path: Path) -> None:
    code, out, _ = run("verify", write_model(tmp_path / "model"))
    assert code == 0
    assert out.splitlines()[-1] == "ok: 0 errors, 0 warnings (every byte, 0 sha256 digests compared)"
    assert "TP=2 works" in out
    assert "TP=8: config.json: num_attention_heads=4 is not divisible; sizes that work: 1, 2, 4" in out


def test_verify_names_what_is_wrong_and_ends_with_65(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = run("verify", model)
    assert code == 65
    assert (
        "error: missing-shard: model-00002-of-00002.safetensors: expected a file, which the index names, "
        "got nothing (1 of 2 shards are there). Download the missing files from the model's source"
    ) in out
    assert out.splitlines()[-1].startswith("NOT ok: ")


def test_verify_is_json_on_demand(tmp_path: Path) -> None:
    code, out, _ = run("verify", "--json", "--headers", write_model(tmp_path / "model"))
    assert code == 0
    assert json.loads(out)["depth"] == "headers"


def test_verify_writes_a_manifest_and_compares_it_next_time(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert run("verify", "--write-manifest", model)[0] == 0
    assert "6 sha256 digests compared" in run("verify", model)[1]


@pytest.mark.parametrize(("device", "named"), [("cpu", "a CPU"), ("v100", "a V100"), ("gpu", "these GPUs")])
def test_verify_is_for_a_device(tmp_path: Path, device: str, named: str) -> None:
    code, out, _ = run("verify", "--headers", "--device", device, fp8_model(tmp_path / "model"))
    assert code == 65
    assert f"cannot be served on {named}" in out.splitlines()[-2]


def fp8_model(folder: Path) -> Path:
    return write(folder, "LlamaForCausalLM", {"quant_method": "fbgemm_fp8"}, attention=fp8, mlp=fp8)


def unknown_architecture(folder: Path) -> Path:
    return write(folder, "Qwen3_6ForCausalLM", COMPRESSED_TENSORS)


def quantized_head(folder: Path) -> Path:
    unignored = COMPRESSED_TENSORS | {"ignore": []}
    return write(folder, "LlamaForCausalLM", unignored, head=compressed_tensors_linear)


def no_tokenizer(folder: Path) -> Path:
    model = write_model(folder)
    (model / "tokenizer.json").unlink()
    return model


def cut_off(folder: Path) -> Path:
    model = write_model(folder)
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    return model


def nothing(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize("preset", ["cpu-smoke", "v100x2-16g-pcie"])
@pytest.mark.parametrize("make", [fp8_model, unknown_architecture, quantized_head, no_tokenizer, cut_off, nothing])
def test_verify_plan_explain_and_serve_refuse_for_one_reason_with_one_code(
    tmp_path: Path, make: Callable[[Path], Path], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.run.engine_decisions.subprocess.run", _not_asked)
    model = make(tmp_path / "model")
    device = "cpu" if preset == "cpu-smoke" else "v100"
    verified, planned, explained, served = (
        run("verify", model, "--device", device),
        run("plan", model, "--preset", preset),
        run("explain", "--model", model, "--preset", preset),
        run("serve", "--model", model, "--preset", preset, "--port", 0),
    )
    assert [code for code, _, _ in (verified, planned, explained, served)] == [65, 65, 65, 65]
    assert planned[2] == served[2]
    reason = served[2].removeprefix("voltserve: ").strip()
    assert explained[1].splitlines()[-1] == f"serve would refuse: {reason}"
    first = reason.partition(" cannot be served on ")[2].partition(": ")[2].partition(" (and ")[0] or reason
    assert first in verified[1] + verified[2]


def _not_asked(*_: object, **__: object) -> object:
    raise OSError("the engine is not asked here")


def test_verify_refuses_flags_that_exclude_each_other(tmp_path: Path) -> None:
    code, _, err = run("verify", "--headers", "--write-manifest", tmp_path)
    assert code == 2
    assert "exclude each other" in err


def test_verify_of_no_directory_is_one_message(tmp_path: Path) -> None:
    code, _, err = run("verify", tmp_path / "none")
    assert code == 65
    assert err == (
        f"voltserve: model directory {tmp_path}/none: expected a directory, got nothing: it does not exist. Models are "
        "local directories; nothing is fetched while serving. `voltserve model fetch NAME DIR` and `voltserve quantize "
        "SRC DST` make one\n"
    )


def test_inspect_shows_what_is_there(tmp_path: Path) -> None:
    code, out, _ = run("inspect", write_model(tmp_path / "model"))
    assert code == 0
    assert "format    compressed-tensors, 16 weights per block scale; activations 16 bits" in out
    assert "layers    2 decoder layers, 14 NVFP4 linears" in out


def test_inspect_is_json_on_demand(tmp_path: Path) -> None:
    code, out, _ = run("inspect", "--json", write_model(tmp_path / "model"))
    assert code == 0
    assert json.loads(out)["linears"] == 14


def test_convert_says_that_every_value_is_kept(tmp_path: Path) -> None:
    code, out, _ = run("convert", write_model(tmp_path / "model"), tmp_path / "out", "--format", "modelopt")
    assert code == 0
    assert out == f"{tmp_path}/out: 14 linears from compressed-tensors to modelopt, every value kept\n"
    assert run("verify", tmp_path / "out")[0] == 0


def test_convert_is_json_on_demand_and_refuses_what_exists(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    code, out, _ = run("convert", "--json", model, tmp_path / "out", "--format", "quasarnvfp4")
    assert code == 0
    assert json.loads(out)["rounded"] == []
    code, _, err = run("convert", model, tmp_path / "out", "--format", "quasarnvfp4")
    assert code == 1
    assert "exists and is not empty" in err
