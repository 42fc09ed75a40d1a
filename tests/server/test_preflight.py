import json
import os
import socket
from pathlib import Path

import pytest

from server import preflight
from server.config import load_config
from server.decisions import Decision
from server.devices import Device, Devices
from server.errors import PreflightError
from server.shards import DamagedShardError, check_shards
from tests.quant.checkpoints import write_model
from tests.server.conftest import NO_TENSORS


def test_a_whole_model_directory_passes(model: Path) -> None:
    (model / "b.safetensors").write_bytes(NO_TENSORS)
    (model / preflight.INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}))
    preflight.check_model(model)


def test_a_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"does not exist.*voltserve model fetch"):
        preflight.check_model(tmp_path / "none")


def test_a_file_is_no_model_directory(model: Path) -> None:
    with pytest.raises(PreflightError, match="is not a directory"):
        preflight.check_model(model / "config.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", "{", r"config\.json cannot be read as JSON"),
        ("config.json", "[]", r"config\.json: expected a JSON object, got list"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", "", "has no weights"),
        (preflight.INDEX, "[]", "expected an object weight_map"),
        (preflight.INDEX, '{"weight_map": {"a": 1}}', "expected an object weight_map"),
        (
            preflight.INDEX,
            '{"weight_map": {"a": "model.safetensors", "b": "x5.safetensors"}}',
            r"1 of 2 .*x5\.safetensors",
        ),
    ],
)
def test_an_incomplete_model_names_the_file(model: Path, name: str, content: str | None, message: str) -> None:
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_text(content)
    with pytest.raises(PreflightError, match=message):
        preflight.check_model(model)


def test_too_few_gpus_are_refused_with_the_numbers(model: Path) -> None:
    one = Devices((Device("Tesla V100-PCIE-16GB", "GPU-1", "7.0", 16, nvlink=False),))
    config = load_config(["--model", str(model), "--preset", "v100x2-16g-pcie"], {}, lambda: one)
    with pytest.raises(PreflightError, match="needs 2 GPUs and 1 were found"):
        preflight.check(config)


def test_parallelism_without_gpus_is_the_cpu_engine_s_affair(model: Path) -> None:
    none = Devices((), "no driver")
    preflight.check(load_config(["--model", str(model), "--preset", "cpu-smoke", "-tp", "2"], {}, lambda: none))


def quantized(model: Path, quantization: object, *flags: str, capability: str = "7.0") -> tuple[Decision, ...]:
    """What is decided about a model of this quantization_config on one card."""
    if quantization:
        config = json.loads((model / "config.json").read_text()) | {"quantization_config": quantization}
        (model / "config.json").write_text(json.dumps(config))
    card = Devices((Device("a card", "GPU-1", capability, 32, nvlink=False),))
    loaded = load_config(["--model", str(model), "--preset", "v100x1-32g", *flags], {}, lambda: card)
    found = preflight.check_quantization(loaded)
    return () if found is None else (found,)


def test_a_v100_s_kernels_for_another_quantization_are_told(model: Path) -> None:
    (decision,) = quantized(model, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert (decision.what, decision.choice) == ("quantization", "gptq")
    assert "exllama" in decision.reason


@pytest.mark.parametrize(
    ("quantization", "flags", "message"),
    [
        (
            {"quant_method": "fp8"},
            (),
            r"config\.json: fp8 \(FP8.* does not run on a V100: vLLM demands 7\.5\. Choose a",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            ("--quantization", "gptq_marlin"),
            r"^--quantization: gptq_marlin .*gptq: it",
        ),
        (None, ("--quantization", "bitsandbytes"), r"^--quantization: bitsandbytes .* the bitsandbytes package"),
        ([], (), None),
    ],
)
def test_a_quantization_without_kernels_for_a_v100_is_refused_before_the_start(
    model: Path, quantization: object, flags: tuple[str, ...], message: str | None
) -> None:
    if message is None:
        assert quantized(model, quantization, *flags) == ()
        return
    with pytest.raises(PreflightError, match=message):
        quantized(model, quantization, *flags)
    assert quantized(model, quantization, *flags, capability="8.0") == (), "other cards are vLLM's affair"


def test_an_nvfp4_model_is_ours_and_needs_no_word(model: Path) -> None:
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert quantized(model, nvfp4) == quantized(model, nvfp4, "--quantization", "quasarnvfp4") == ()


def test_a_taken_port_says_so() -> None:
    with preflight.bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(PreflightError, match=r"cannot listen on 127\.0\.0\.1 port .*--port"):
            preflight.bind("127.0.0.1", taken.getsockname()[1])


def test_an_unknown_host_says_so() -> None:
    with pytest.raises(PreflightError, match="cannot listen on no such host"):
        preflight.bind("no such host", 0)


def test_an_ipv6_address_can_be_listened_on() -> None:
    with preflight.bind("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("speculation", "drops", "message"),
    [
        (
            {"method": "mtp", "num_speculative_tokens": 1},
            "",
            r"expected mtp\.\* tensors, as .*declares 1 MTP layers, got none",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2}, "", "Gated DeltaNet layers, .* cannot take back"),
        ({"method": "ngram", "num_speculative_tokens": 2}, "linear_num_value_heads", None),
    ],
)
def test_drafting_that_the_model_cannot_do_is_refused(
    tmp_path: Path, speculation: dict[str, object], drops: str, message: str | None
) -> None:
    write_model(tmp_path)
    text = {"mtp_num_hidden_layers": 1, "linear_num_value_heads": 48}
    text.pop(drops, None)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    flags = ["--model", str(tmp_path), "--speculative-config", json.dumps(speculation)]
    config = load_config(flags, {}, lambda: Devices(()))
    if message is None:
        preflight.check_speculation(config)
        return
    with pytest.raises(PreflightError, match=message):
        preflight.check_speculation(config)


def test_workers_that_ray_starts_need_ray(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--preset", "cpu-smoke", "--distributed-executor-backend", "ray", "--pipeline-parallel-size", "2"]
    config = load_config(["--model", str(model), *flags], {}, lambda: Devices((), "no driver"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="Ray is absent from this Python"):
        preflight.check_ray(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    preflight.check_ray(config)


def test_a_shard_that_is_cut_off_is_named_with_its_bytes_and_ends_as_damage_does(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (shard, *_) = sorted(model.glob("*.safetensors"))
    size = shard.stat().st_size
    os.truncate(shard, size - 3)
    config = load_config(["--model", str(model)], {}, lambda: Devices((), "none"))
    with pytest.raises(DamagedShardError, match=f"expected a file of {size} bytes, got {size - 3}") as raised:
        preflight.check(config)
    assert raised.value.exit_code == 65
    assert str(shard) in str(raised.value)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"<!doctype html>", b"\0"])
def test_what_is_no_shard_is_told_for_what_it_is(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedShardError, match=r"Git LFS pointer|a web page|at least 8 bytes"):
        check_shards(model)


def test_a_damaged_file_that_the_index_does_not_name_is_not_read(model: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"x")
    (model / preflight.INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    check_shards(model)


def test_weights_in_another_format_have_no_headers_to_check(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.bin")
    check_shards(model)
