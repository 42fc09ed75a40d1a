import json
import socket
from pathlib import Path

import pytest

from server.config.devices import Device, Devices
from server.config.settings import load_config
from server.decisions import Decision
from server.errors import PreflightError
from server.run import preflight, servable
from tests.quant.checkpoints import FIRST, INDEX, MODELOPT, modelopt_linear, write_model


def on_cpu(model: Path, *flags: str) -> tuple[Decision, ...]:
    """What is decided before a start on a machine without GPUs."""
    return preflight.check(load_config(["--model", str(model), *flags], {}, lambda: Devices((), "no driver")))


def test_a_whole_model_directory_passes(model: Path) -> None:
    assert on_cpu(model) == ()


def test_a_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"does not exist.*voltserve model fetch"):
        on_cpu(tmp_path / "none")


def test_a_file_is_no_model_directory(model: Path) -> None:
    with pytest.raises(PreflightError, match="is not a directory"):
        on_cpu(model / "config.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", "{", r"config\.json: expected a JSON object, got"),
        ("config.json", "[]", r"config\.json: expected a JSON object, got a list"),
        (FIRST, None, rf"{FIRST}: expected a file, which the index names, got nothing \(1 of 2"),
        (FIRST, "", rf"{FIRST}: expected at least 8 bytes, got 0 bytes"),
        (INDEX, "[]", rf"{INDEX}: expected a JSON object, got a list"),
        (INDEX, '{"weight_map": {"a": 1}}', rf"{INDEX}: a: expected a shard's file name, got 1"),
        ("tokenizer.json", None, r"expected one of tokenizer\.json, .* got none"),
    ],
)
def test_an_incomplete_model_names_the_file(model: Path, name: str, content: str | None, message: str) -> None:
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_text(content)
    with pytest.raises(PreflightError, match=message):
        on_cpu(model)


def test_too_few_gpus_are_refused_with_the_numbers(model: Path) -> None:
    one = Devices((Device("Tesla V100-PCIE-16GB", "GPU-1", "7.0", 16, nvlink=False),))
    config = load_config(["--model", str(model), "--preset", "v100x2-16g-pcie"], {}, lambda: one)
    with pytest.raises(PreflightError, match="needs 2 GPUs and 1 were found"):
        preflight.check(config)


def test_parallelism_without_gpus_is_the_cpu_engine_s_affair(model: Path) -> None:
    none = Devices((), "no driver")
    preflight.check(load_config(["--model", str(model), "--preset", "cpu-smoke", "-tp", "2"], {}, lambda: none))


def quantized(model: Path, quantization: object, *flags: str, capability: str = "7.0") -> None:
    """Examines a model of this quantization_config for one card."""
    if quantization is not None:
        config = json.loads((model / "config.json").read_text()) | {"quantization_config": quantization}
        (model / "config.json").write_text(json.dumps(config))
    card = Devices((Device("a card", "GPU-1", capability, 32, nvlink=False),))
    servable.check(load_config(["--model", str(model), "--preset", "v100x1-32g", *flags], {}, lambda: card))


@pytest.mark.parametrize("capability", ["7.0", "8.0"])
@pytest.mark.parametrize(
    ("quantization", "flags", "message"),
    [
        (
            {"quant_method": "fbgemm_fp8"},
            (),
            r"config\.json: quant_method: expected .* has kernels for on .*, got fbgemm_fp8 .*NVFP4",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            (),
            r"config\.json: quant_method: .* got gptq \(GPTQ.*`voltserve quantize`",
        ),
        (None, ("--quantization", "bitsandbytes"), r"--quantization: .* bitsandbytes"),
    ],
)
def test_a_quantization_without_kernels_is_refused_before_the_start(
    tmp_path: Path, quantization: object, flags: tuple[str, ...], message: str, capability: str
) -> None:
    model = write_model(tmp_path / "model", quantization=None)
    with pytest.raises(PreflightError, match=message):
        quantized(model, quantization, *flags, capability=capability)


def test_an_nvfp4_model_is_ours_and_needs_no_word(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", modelopt_linear, MODELOPT)
    quantized(model, None)
    quantized(model, None, "--quantization", "quasarnvfp4")


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
    declared = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(declared | {"text_config": text}))
    flags = ["--model", str(tmp_path), "--speculative-config", json.dumps(speculation)]
    config = load_config(flags, {}, lambda: Devices(()))
    seen = servable.check(config)
    if message is None:
        preflight.check_speculation(config, seen)
        return
    with pytest.raises(PreflightError, match=message):
        preflight.check_speculation(config, seen)


def test_workers_that_ray_starts_need_ray(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--preset", "cpu-smoke", "--distributed-executor-backend", "ray", "--pipeline-parallel-size", "2"]
    config = load_config(["--model", str(model), *flags], {}, lambda: Devices((), "no driver"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="Ray is absent from this Python"):
        preflight.check_ray(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    preflight.check_ray(config)
