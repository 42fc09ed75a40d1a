"""Ways in which a model directory can be broken, each with the finding that must name it; long, as a table is."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quant.verify import verify
from tests.quant.checkpoints import (
    COMPRESSED_TENSORS,
    CONFIG,
    DOWN,
    FIRST,
    INDEX,
    MODELOPT,
    SECOND,
    compressed_tensors_linear,
    modelopt_linear,
    read_json,
    read_shard,
    write_json,
    write_model,
    write_safetensors,
)

Change = Callable[[Path], object]


def tensor(name: str, change: Callable[[tuple[Any, ...]], tuple[Any, ...] | None], shard: str = SECOND) -> Change:
    """Replaces a tensor's (dtype, shape, bytes), or leaves it out."""

    def apply(model: Path) -> None:
        tensors = read_shard(model / shard)
        changed = change(tensors[name])
        tensors = {key: (changed if key == name else value) for key, value in tensors.items()}
        write_safetensors(model / shard, {key: value for key, value in tensors.items() if value is not None})

    return apply


def raw(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Changes a file's bytes."""
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


def header(change: Callable[[dict[str, Any]], object], shard: str = SECOND) -> Change:
    """Changes a shard's JSON header."""

    def apply(model: Path) -> None:
        before = (model / shard).read_bytes()
        (length,) = struct.unpack("<Q", before[:8])
        entries = json.loads(before[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (model / shard).write_bytes(struct.pack("<Q", len(text)) + text + before[8 + length :])

    return apply


def data(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Changes a JSON file."""

    def apply(model: Path) -> None:
        content = read_json(model / name)
        change(content)
        write_json(model / name, content)

    return apply


def quantization(**changed: object) -> Change:
    return data("config.json", lambda config: config["quantization_config"].update(changed))


def weights(**changed: object) -> Change:
    group = "group_0"
    return data(
        "config.json", lambda config: config["quantization_config"]["config_groups"][group]["weights"].update(changed)
    )


def drop(*parts: str) -> Change:
    """Leaves the named tensors out of the second shard and of the index."""

    def apply(model: Path) -> None:
        tensors = {name: value for name, value in read_shard(model / SECOND).items() if not name.endswith(parts)}
        write_safetensors(model / SECOND, tensors)
        index = read_json(model / INDEX)
        index["weight_map"] = {
            name: shard for name, shard in index["weight_map"].items() if shard == FIRST or name in tensors
        }
        write_json(model / INDEX, index)

    return apply


def removed(name: str) -> Change:
    return lambda model: (model / name).unlink()


def in_turn(*changes: Change) -> Change:
    def apply(model: Path) -> None:
        for change in changes:
            change(model)

    return apply


def instead_of_down_proj(*tensors: tuple[str, str, list[int], bytes]) -> Change:
    """Replaces down_proj's tensors by others, in the shard and in the index."""

    def apply(model: Path) -> None:
        kept = {name: value for name, value in read_shard(model / SECOND).items() if not name.startswith(DOWN)}
        kept |= {f"{DOWN}.{suffix}": (dtype, shape, content) for suffix, dtype, shape, content in tensors}
        write_safetensors(model / SECOND, kept)
        index = read_json(model / INDEX)
        index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard == FIRST}
        index["weight_map"] |= dict.fromkeys(kept, SECOND)
        write_json(model / INDEX, index)

    return apply


def wrong_digest(model: Path) -> None:
    (model / "SHA256SUMS").write_text(f"{hashlib.sha256(b'other').hexdigest()}  {SECOND}\n")


def float32(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


# name: (change, severity, check, file, tensor, parts of expected and got)
BROKEN: dict[str, tuple[Change, str, str, str, str, str, str]] = {
    "a shard is missing": (
        lambda model: (model / SECOND).unlink(),
        *("error", "missing-shard", SECOND, "", "a file, which the index names", "nothing (1 of 2 shards are there)"),
    ),
    "a shard is cut short": (
        raw(SECOND, lambda content: content[:-100]),
        *("error", "header", SECOND, "", "a file of", "100 bytes less"),
    ),
    "a shard has bytes at its end": (
        raw(SECOND, lambda content: content + b"\0" * 3),
        *("error", "header", SECOND, "", "a file of", "3 bytes more"),
    ),
    "a shard is cut inside its header": (
        raw(SECOND, lambda content: content[:200]),
        *("error", "header", SECOND, "", "a header of", "a file of 200 bytes, which cannot hold it"),
    ),
    "a shard is empty": (
        raw(SECOND, lambda _: b""),
        *("error", "header", SECOND, "", "at least 8 bytes", "0 bytes"),
    ),
    "a shard is an LFS pointer": (
        raw(SECOND, lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        *("error", "header", SECOND, "", "tensor data", "a Git LFS pointer of"),
    ),
    "a shard is a web page": (
        raw(SECOND, lambda _: b"<!DOCTYPE html><html>Access denied</html>"),
        *("error", "header", SECOND, "", "tensor data", "a web page"),
    ),
    "a header's length is absurd": (
        raw(SECOND, lambda content: b"\xff" * 8 + content[8:]),
        *("error", "header", SECOND, "", "a header of at most 100000000 bytes", "length 18446744073709551615"),
    ),
    "a header is no JSON": (
        raw(SECOND, lambda content: content[:8] + b"}" + content[9:]),
        *("error", "header", SECOND, "", "'{' as the header's first byte at header byte 0", "'}"),
    ),
    "tensors overlap": (
        header(lambda entries: entries[f"{DOWN}.weight_global_scale"].update(data_offsets=[0, 4])),
        *("error", "header", SECOND, "model.layers.1.input_layernorm.weight", "data from offset 4", "an overlap"),
    ),
    "offsets do not fit the shape": (
        header(lambda entries: entries[f"{DOWN}.weight_packed"].update(shape=[64, 65])),
        *("error", "header", SECOND, f"{DOWN}.weight_packed", "4160 bytes for U8 [64, 65]", "data_offsets"),
    ),
    "a dtype is unknown": (
        header(lambda entries: entries[f"{DOWN}.weight_packed"].update(dtype="F128")),
        *("error", "header", SECOND, f"{DOWN}.weight_packed", "a dtype of", "F128"),
    ),
    "an extra shard lies there": (
        lambda model: shutil.copy(model / SECOND, model / "model-00003-of-00003.safetensors"),
        *("warning", "extra-shard", "model-00003-of-00003.safetensors", "", "only shards", "another"),
    ),
    "there are several shards and no index": (
        lambda model: (model / INDEX).unlink(),
        *("error", "index", INDEX, "", "an index of the shards", "2 shards and no index"),
    ),
    "there is no shard": (
        in_turn(*(removed(name) for name in (FIRST, SECOND, INDEX))),
        *("error", "shards", "", "", "*.safetensors files", "none"),
    ),
    "the index is no JSON": (
        raw(INDEX, lambda _: b"{"),
        *("error", "index", INDEX, "", "a JSON object", "Expecting property name"),
    ),
    "the index names a path": (
        data(INDEX, lambda index: index["weight_map"].update({"a": "../other.safetensors"})),
        *("error", "index", INDEX, "a", "a shard's file name", "'../other.safetensors'"),
    ),
    "the index names a tensor that its shard does not hold": (
        data(INDEX, lambda index: index["weight_map"].update({"model.absent": FIRST})),
        *("error", "index", FIRST, "model.absent", "tensors that the index names", "no model.absent"),
    ),
    "a shard holds a tensor that the index does not name": (
        data(INDEX, lambda index: index["weight_map"].pop(f"{DOWN}.weight_packed")),
        *("error", "index", SECOND, f"{DOWN}.weight_packed", "only tensors that the index names", DOWN),
    ),
    "config.json is missing": (
        lambda model: (model / "config.json").unlink(),
        *("error", "config", "", "", "a model that can be read", "config.json is missing"),
    ),
    "config.json is cut short": (
        raw("config.json", lambda content: content[:50]),
        *("error", "config", "config.json", "", "a JSON object", "Unterminated string"),
    ),
    "config.json is an LFS pointer": (
        raw("config.json", lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
        *("error", "lfs-pointer", "config.json", "", "the file", "a Git LFS pointer of 43 bytes"),
    ),
    "the tokenizer is missing": (
        lambda model: (model / "tokenizer.json").unlink(),
        *("error", "tokenizer", "", "", "one of tokenizer.json", "none"),
    ),
    "merges.txt is missing beside vocab.json": (
        lambda model: (model / "tokenizer.json").rename(model / "vocab.json"),
        *("error", "tokenizer", "merges.txt", "", "a file, beside vocab.json", "nothing"),
    ),
    "tokenizer_config.json is missing": (
        lambda model: (model / "tokenizer_config.json").unlink(),
        *("warning", "tokenizer", "tokenizer_config.json", "", "a file", "nothing: special tokens"),
    ),
    "a file's digest is wrong": (wrong_digest, "error", "sha256", SECOND, "", "sha256 ", ""),
    "a file of the manifest is missing": (
        lambda model: (model / "SHA256SUMS").write_text(f"{'0' * 64}  merges.txt\n"),
        *("error", "sha256", "merges.txt", "", "a file, which SHA256SUMS lists", "nothing"),
    ),
    "the manifest leaves shards out": (
        lambda model: (model / "SHA256SUMS").write_text(
            f"{hashlib.sha256((model / FIRST).read_bytes()).hexdigest()}  {FIRST}\n"
        ),
        *("warning", "sha256", SECOND, "", "all shards in SHA256SUMS", SECOND),
    ),
    "the manifest is malformed": (
        lambda model: (model / "SHA256SUMS").write_text("not a digest\n"),
        *("error", "manifest", "SHA256SUMS: line 1", "", "a digest and a new file name", "'not a digest'"),
    ),
    "the manifest points outside": (
        lambda model: (model / "SHA256SUMS").write_text(f"{'0' * 64}  ../secret\n"),
        *("error", "manifest", "SHA256SUMS: line 1", "", "a digest and a new file name", "../secret"),
    ),
    "block scales are floats of another kind": (
        tensor(f"{DOWN}.weight_scale", lambda old: ("F8_E5M2", old[1], old[2])),
        *("error", "dtype", SECOND, f"{DOWN}.weight_scale", "F8_E4M3 [64, 8]", "F8_E5M2 [64, 8]"),
    ),
    "block scales have another shape": (
        tensor(f"{DOWN}.weight_scale", lambda old: (old[0], [8, 64], old[2])),
        *("error", "shape", SECOND, f"{DOWN}.weight_scale", "F8_E4M3 [64, 8]", "F8_E4M3 [8, 64]"),
    ),
    "codes have another shape": (
        tensor(f"{DOWN}.weight_packed", lambda old: (old[0], [2, 32, 64], old[2])),
        *("error", "shape", SECOND, f"{DOWN}.weight_packed", "[N, K/2]", "U8 [2, 32, 64]"),
    ),
    "a global scale is a vector": (
        tensor(f"{DOWN}.weight_global_scale", lambda old: (old[0], [2], old[2] * 2)),
        *("error", "shape", SECOND, f"{DOWN}.weight_global_scale", "F32 [1]", "F32 [2]"),
    ),
    "a global scale is in 16 bits": (
        tensor(f"{DOWN}.weight_global_scale", lambda _: ("F16", [1], b"\0\x3c")),
        *("error", "dtype", SECOND, f"{DOWN}.weight_global_scale", "F32 [1]", "F16 [1]"),
    ),
    "a linear's scales are missing": (
        drop("1.mlp.down_proj.weight_scale"),
        *("error", "missing-tensor", SECOND, f"{DOWN}.weight_scale", "a tensor", "nothing"),
    ),
    "a linear's global scale is missing": (
        drop("1.mlp.down_proj.weight_global_scale"),
        *("error", "missing-tensor", SECOND, f"{DOWN}.weight_global_scale", "a tensor", "nothing"),
    ),
    "a linear's codes are missing": (
        drop("1.mlp.down_proj.weight_packed"),
        *("error", "missing-tensor", SECOND, DOWN, "a whole linear", "a weight_scale without its weight"),
    ),
    "a block scale is NaN": (
        tensor(f"{DOWN}.weight_scale", lambda old: (*old[:2], old[2][:9] + b"\xff" + old[2][10:])),
        *("error", "not-a-number", SECOND, f"{DOWN}.weight_scale", "numbers", "NaN at [1, 1]"),
    ),
    "a 16-bit weight is NaN": (
        tensor("model.layers.1.input_layernorm.weight", lambda old: (*old[:2], b"\xc0\x7f" + old[2][2:])),
        *("error", "not-a-number", SECOND, "model.layers.1.input_layernorm.weight", "numbers", "NaN or Inf at [0]"),
    ),
    "a global scale is NaN": (
        tensor(f"{DOWN}.weight_global_scale", lambda old: (*old[:2], float32(float("nan")))),
        *("error", "not-a-number", SECOND, f"{DOWN}.weight_global_scale", "numbers", "NaN or Inf at [0]"),
    ),
    "a global scale is 0": (
        tensor(f"{DOWN}.weight_global_scale", lambda old: (*old[:2], float32(0))),
        *("error", "global-scale", SECOND, f"{DOWN}.weight_global_scale", "a positive number", "0.0"),
    ),
    "a global scale is negative": (
        tensor(f"{DOWN}.weight_global_scale", lambda old: (*old[:2], float32(-4))),
        *("error", "global-scale", SECOND, f"{DOWN}.weight_global_scale", "a positive number", "-4.0"),
    ),
    "a weight's codes are all 0 and -0": (
        tensor(f"{DOWN}.weight_packed", lambda old: (*old[:2], b"\x80\x08" * (len(old[2]) // 2))),
        *("warning", "all-zero", SECOND, DOWN, "weights other than 0", "only 0"),
    ),
    "a weight's scales are all 0": (
        tensor(f"{DOWN}.weight_scale", lambda old: (*old[:2], bytes(len(old[2])))),
        *("warning", "all-zero", SECOND, DOWN, "weights other than 0", "only 0"),
    ),
    "the embedding is all 0": (
        tensor("model.embed_tokens.weight", lambda old: (*old[:2], bytes(len(old[2]))), FIRST),
        *("warning", "all-zero", FIRST, "model.embed_tokens.weight", "weights other than 0", "only 0"),
    ),
    "the config declares another block size": (
        weights(group_size=32),
        *("error", "config", FIRST, "model.layers.0.self_attn.q_proj", "block size 32, as", "16 (K=64)"),
    ),
    "the config is MXFP4's": (
        weights(group_size=32, scale_dtype="torch.uint8"),
        *("error", "format", "weights.scale_dtype", "", "null or 'torch.float8_e4m3fn'", "'torch.uint8'"),
    ),
    "the config declares FP8": (
        data("config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"})),
        *("error", "config", "", "", "FP8 linears, as", "none"),
    ),
    "the config declares no quantization": (
        data("config.json", lambda config: config.pop("quantization_config")),
        *(
            "error",
            "config",
            FIRST,
            "model.layers.0.self_attn.q_proj",
            "16-bit weights",
            "14 quantized linears, NVFP4 among them",
        ),
    ),
    "the config ignores a quantized layer": (
        quantization(ignore=["lm_head", "re:.*layers.1.*down_proj"]),
        *("error", "config", SECOND, DOWN, "16-bit weights, as", "NVFP4"),
    ),
    "the config does not ignore a 16-bit layer": (
        instead_of_down_proj(("weight", "BF16", [64, 128], b"\x80\x3f" * (64 * 128))),
        *("error", "config", SECOND, DOWN, "quantized weights, as", "16-bit weights"),
    ),
    "a layer is FP8": (
        instead_of_down_proj(
            ("weight", "F8_E4M3", [64, 128], b"\x38" * (64 * 128)), ("weight_scale", "F32", [1], float32(1))
        ),
        *("error", "config", SECOND, DOWN, "no FP8 linears, as", f"1: {DOWN}"),
    ),
    "a layer is MXFP4": (
        instead_of_down_proj(
            ("weight_packed", "U8", [64, 64], b"\x11" * (64 * 64)), ("weight_scale", "U8", [64, 4], b"\x7f" * 256)
        ),
        *(
            "error",
            "format",
            SECOND,
            DOWN,
            "NVFP4, FP8 (E4M3) or 16-bit weights",
            "MXFP4 (U8 codes with power-of-two E8M0",
        ),
    ),
    "a layer is GPTQ": (
        instead_of_down_proj(("qweight", "I32", [16, 64], bytes(4096)), ("scales", "F16", [1, 64], bytes(128))),
        *("error", "format", SECOND, DOWN, "NVFP4, FP8 (E4M3) or 16-bit weights", "I32 weights (qweight, scales)"),
    ),
    "a layer has ModelOpt's tensors in a compressed-tensors model": (
        instead_of_down_proj(
            *((key.removeprefix(f"{DOWN}."), *value) for key, value in modelopt_linear(DOWN, 64, 128).items())
        ),
        *("error", "config", SECOND, DOWN, "compressed-tensors tensors (weight_global_scale)", "weight_scale_2"),
    ),
    "a fused layer is only partly quantized": (
        in_turn(
            drop(
                "1.self_attn.k_proj.weight_packed",
                "1.self_attn.k_proj.weight_scale",
                "1.self_attn.k_proj.weight_global_scale",
            ),
            lambda model: write_safetensors(
                model / SECOND,
                read_shard(model / SECOND)
                | {"model.layers.1.self_attn.k_proj.weight": ("BF16", [32, 64], b"\x80\x3f" * 2048)},
            ),
            data(INDEX, lambda index: index["weight_map"].update({"model.layers.1.self_attn.k_proj.weight": SECOND})),
        ),
        *(
            "error",
            "fused",
            "",
            "model.layers.1.self_attn.q_proj",
            "quantized all or none",
            "16-bit model.layers.1.self",
        ),
    ),
    "fused layers carry different globals": (
        tensor("model.layers.1.self_attn.k_proj.weight_global_scale", lambda old: (*old[:2], float32(128))),
        *(
            "info",
            "fused-globals",
            "",
            "model.layers.1.self_attn.q_proj",
            "one global scale",
            "in 1 of 4 fused layers, up to 2.00",
        ),
    ),
    "the config declares more layers": (
        data("config.json", lambda config: config.update(num_hidden_layers=4)),
        *("error", "absent-layer", "", "", "4 layers as in config.json", "no tensors for 2 layers: 2, 3"),
    ),
    "the head is missing and the config does not tie it to the embedding": (
        lambda model: [
            tensor("lm_head.weight", lambda _: None, FIRST)(model),
            data(INDEX, lambda index: index["weight_map"].pop("lm_head.weight"))(model),
            data("config.json", lambda config: config.update(tie_word_embeddings=False))(model),
        ],
        *("error", "missing-tensor", "", "lm_head.weight", "a head of its own", "nothing"),
    ),
    "the config declares an MTP layer": (
        data("config.json", lambda config: config.update(mtp_num_hidden_layers=1)),
        *("warning", "absent-layer", "", "", "MTP layers", "no mtp tensors"),
    ),
    "the config declares another hidden size": (
        data("config.json", lambda config: config.update(hidden_size=48)),
        *("error", "shape", FIRST, "model.embed_tokens", "hidden_size 48", "K=64 of [32, 64]"),
    ),
    "the vocabulary is larger than the embedding": (
        data("config.json", lambda config: config.update(vocab_size=33)),
        *("error", "shape", FIRST, "model.embed_tokens", "vocab_size 33", "N=32 of [32, 64]"),
    ),
    "the config wants an FP8 cache": (
        quantization(kv_cache_scheme={"num_bits": 8, "type": "float"}),
        *("info", "kv-cache", "", "", "a 16-bit key/value cache", "FP8 cache in the config and 0 k_scale"),
    ),
    "the model is W4A4": (
        data(
            "config.json",
            lambda config: config["quantization_config"]["config_groups"]["group_0"].update(input_activations={}),
        ),
        *("info", "activations", "", "", "16-bit activations", "a W4A4 model"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_finding_names_file_tensor_expected_and_got(tmp_path, name):
    change, severity, check, file, where, expected, got = BROKEN[name]
    model = write_model(tmp_path / "model")
    change(model)

    report = verify(model)

    matching = [
        finding
        for finding in report.findings
        if (finding.severity, finding.check, finding.tensor) == (severity, check, where)
        and finding.file.endswith(file)
        and expected in finding.expected
        and got in finding.got
    ]
    assert matching, "\n".join(map(str, report.findings))
    assert all(finding.remedy for finding in report.findings)
    assert report.ok == (severity != "error")


@pytest.mark.parametrize("depth", ["headers", "full"])
@pytest.mark.parametrize(
    ("make_linear", "quantization"),
    [(compressed_tensors_linear, COMPRESSED_TENSORS), (modelopt_linear, MODELOPT)],
    ids=["compressed-tensors", "modelopt"],
)
def test_a_whole_model_has_nothing_wrong(tmp_path, make_linear, quantization, depth):
    report = verify(write_model(tmp_path / "model", make_linear, quantization), depth)

    assert report.ok
    assert [finding for finding in report.findings if finding.check != "activations"] == []
    assert (len(report.modules.nvfp4), report.scheme and report.scheme.group_size) == (14, 16)


def test_a_16_bit_model_has_nothing_wrong(tmp_path):
    def plain(name: str, rows: int, columns: int) -> dict[str, Any]:
        return {f"{name}.weight": ("F16", [rows, columns], b"\0\x3c" * rows * columns)}

    report = verify(write_model(tmp_path / "model", plain, None))

    assert (report.findings, report.scheme) == ((), None)


def test_headers_alone_leave_values_alone(tmp_path):
    model = write_model(tmp_path / "model")
    BROKEN["a block scale is NaN"][0](model)
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  {FIRST}\n")

    assert verify(model, "headers").ok
    assert not verify(model, "full").ok


def test_a_suspicious_global_is_a_warning_until_the_weights_are_read(tmp_path):
    model = write_model(tmp_path / "model")
    BROKEN["a global scale is 0"][0](model)

    (finding,) = verify(model, "headers").findings

    assert (finding.severity, finding.check) == ("warning", "global-scale")


def test_an_all_zero_weight_may_carry_any_global(tmp_path):
    model = write_model(tmp_path / "model")
    BROKEN["a global scale is 0"][0](model)
    BROKEN["a weight's scales are all 0"][0](model)

    report = verify(model)

    assert report.ok
    assert [finding.check for finding in report.findings] == ["all-zero"]


def test_a_wrong_config_does_not_bury_the_rest_under_its_findings(tmp_path):
    linears = {f"model.layers.{n}.mlp.down_proj": (16, 64) for n in range(100)}
    tensors: dict[str, Any] = {}
    for name, (rows, columns) in linears.items():
        tensors |= compressed_tensors_linear(name, rows, columns)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    wrong = json.loads(json.dumps(COMPRESSED_TENSORS))
    wrong["config_groups"]["group_0"]["weights"]["group_size"] = 32
    write_json(tmp_path / "config.json", CONFIG | {"quantization_config": wrong})
    write_json(tmp_path / "tokenizer.json", {})

    findings = [str(finding) for finding in verify(tmp_path).findings if finding.check == "config"]

    assert len(findings) == 21
    assert "80 more findings of 'config'" in findings[-1]


def test_kv_scales_are_recognised(tmp_path):
    def with_kv_scale(name: str, rows: int, columns: int) -> dict[str, Any]:
        tensors = modelopt_linear(name, rows, columns)
        kind = name.rpartition(".")[2]
        if kind in ("k_proj", "v_proj"):
            tensors[f"{name}.{kind[0]}_scale"] = ("F32", [], float32(0.5))
        return tensors

    report = verify(write_model(tmp_path / "model", with_kv_scale, MODELOPT))

    assert report.ok
    (finding,) = [finding for finding in report.findings if finding.check == "kv-cache"]
    assert "4 k_scale/v_scale tensors" in finding.got
