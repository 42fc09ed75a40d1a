"""`voltserve verify`, `inspect` and `convert`, as a user runs them."""

import json
from pathlib import Path

from typer.testing import CliRunner

from server.cli import app
from tests.quant.checkpoints import write_model


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_verify_ends_with_the_verdict_and_0(tmp_path: Path) -> None:
    code, out, _ = run("verify", write_model(tmp_path / "model"))
    assert code == 0
    assert out.splitlines()[-1] == "ok: 0 errors, 0 warnings (every byte, 0 sha256 digests compared)"
    assert "TP=2 works" in out
    assert "TP=8: config.json: num_attention_heads=4 is not divisible; sizes that work: 1, 2, 4" in out


def test_verify_names_what_is_wrong_and_ends_with_1(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = run("verify", model)
    assert code == 1
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


def test_verify_refuses_flags_that_exclude_each_other(tmp_path: Path) -> None:
    code, _, err = run("verify", "--headers", "--write-manifest", tmp_path)
    assert code == 2
    assert "exclude each other" in err


def test_verify_of_no_directory_is_one_message(tmp_path: Path) -> None:
    code, _, err = run("verify", tmp_path / "none")
    assert code == 1
    assert err == (
        f"voltserve: {tmp_path}/none: expected a directory, got nothing. "
        "Name a model directory: config.json, safetensors shards and tokenizer files\n"
    )


def test_inspect_shows_what_is_there(tmp_path: Path) -> None:
    code, out, _ = run("inspect", write_model(tmp_path / "model"))
    assert code == 0
    assert "format    compressed-tensors, 16 weights a block scale; activations 16 bits" in out
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
