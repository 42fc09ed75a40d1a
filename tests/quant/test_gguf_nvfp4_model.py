"""A Llama whose linears are NVFP4 in GGUF, written byte by byte, to a ModelOpt directory."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from quant.errors import QuantError
from quant.formats import modelopt
from quant.formats.linear import read_linear
from quant.gguf_convert import PER_LAYER, convert_gguf
from quant.gguf_file import open_gguf
from quant.verify import verify
from tests.quant.formats.test_gguf_nvfp4 import VALUES, block
from tests.quant.reference import E4M3_NAN, e4m3_value
from tests.quant.tiny_gguf import FFN, HEADS, KV_HEADS, LAYERS, weights, write_gguf

NVFP4 = 40


def metadata(tmp_path: Path) -> tuple[bytes, int]:
    """The metadata of the tiny model as the `gguf` package writes it, and how many entries it has."""
    write_gguf(tmp_path / "empty.gguf", tensors={})
    reader = gguf.GGUFReader(tmp_path / "empty.gguf")
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    end = max(field.offset + sum(int(part.nbytes) for part in field.parts) for field in fields)
    return (tmp_path / "empty.gguf").read_bytes()[24:end], len(fields)


def write_by_hand(tmp_path, tensors):
    """`tensors`: name to (type, shape with the slowest dimension first, bytes)."""
    fields, count = metadata(tmp_path)
    infos, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % 32)
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + fields + infos
    (tmp_path / "model.gguf").write_bytes(head + bytes(-len(head) % 32) + data)
    return tmp_path / "model.gguf"


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    # K of 96 is no multiple of 64: ggml leaves ffn_down in 16 bits.
    return name.startswith("blk.") and len(shape) == 2 and shape[1] % 64 == 0


def tiny_tensors():
    """(what the file holds, the exact values of each NVFP4 matrix)."""
    random = np.random.default_rng(0)
    tensors, exact = {}, {}
    for name, weight in weights().items():
        if not is_linear(name, weight.shape):
            tensors[name] = (0, weight.shape, weight.astype("<f4").tobytes())
            continue
        rows, columns = weight.shape
        codes = random.integers(0, 16, (rows, columns))
        scales = random.integers(1, E4M3_NAN, (rows, columns // 16))
        raw = b"".join(
            block(scales[r, 4 * b : 4 * b + 4].tolist(), codes[r, 64 * b : 64 * b + 64].tolist())
            for r in range(rows)
            for b in range(columns // 64)
        )
        factor = np.float32(random.uniform(1e-4, 1e-2))
        tensors[name] = (NVFP4, (rows, columns), raw)
        tensors[f"{name.removesuffix('.weight')}.scale"] = (0, (1,), factor.tobytes())
        product = VALUES[codes] * np.vectorize(e4m3_value)(scales).repeat(16, axis=1)
        exact[name] = product.astype(np.float32) * factor
    return tensors, exact


def test_nvfp4_linears_become_modelopt_s_exactly(tmp_path):
    tensors, exact = tiny_tensors()
    out = tmp_path / "out"
    out.mkdir()

    convert_gguf(write_by_hand(tmp_path, tensors), out)

    report = verify(out)
    assert report.ok, report.findings
    assert report.scheme is not None
    assert report.scheme.layout == modelopt.LAYOUT
    assert len(report.modules.nvfp4) == len(exact) == LAYERS * 6
    loaded = load_file(out / "model.safetensors")
    for source, values in exact.items():
        _, layer, leaf = source.split(".", 2)
        module = f"model.layers.{layer}.{PER_LAYER[leaf].removesuffix('.weight')}"
        own = {name.rpartition(".")[2]: tensor for name, tensor in loaded.items() if name.startswith(f"{module}.")}
        heads = {"attn_q.weight": HEADS, "attn_k.weight": KV_HEADS}.get(leaf)
        expected = values
        if heads:
            # From ggml's rotary pairs back to halves.
            expected = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(read_linear(modelopt.LAYOUT, own, module, 16).dequantize().numpy(), expected)
    assert loaded["model.layers.0.mlp.down_proj.weight"].shape == (64, FFN)


def test_the_bytes_are_mapped_with_shape_and_type(tmp_path):
    tensors, _ = tiny_tensors()

    file = open_gguf(write_by_hand(tmp_path, tensors))

    assert file.tensors.keys() == tensors.keys()
    for name, (kind, shape, raw) in tensors.items():
        assert (file.tensors[name].type, file.tensors[name].shape) == (kind, tuple(shape))
        assert file.tensors[name].data.tobytes() == raw


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", extra=("llama.rope.freq_base_swa", 0.5))
    theirs = gguf.GGUFReader(tmp_path / "tiny.gguf").fields

    ours = open_gguf(tmp_path / "tiny.gguf").fields

    assert ours == {name: field.contents() for name, field in theirs.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"output_norm|blk.*: expected bytes .* to .*, got a file of"),
        (lambda raw: raw[:200], "expected a GGUF file, got one of 200 bytes"),
        (lambda raw: b"GGML" + raw[4:], "got one that starts with b'GGML'"),
        (lambda raw: raw[:4] + b"\1\0\0\0" + raw[8:], "expected GGUF version 2 or 3, got 1"),
        (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], r"which cannot hold 18446744073709551615 entries"),
        (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], r"which cannot hold 18446744073709551615 entries"),
        (lambda raw: raw[:24] + b"\xff" * 8 + raw[32:], "which ends within 18446744073709551615 bytes at 32"),
        (
            lambda raw: raw.replace(b"blk.0.attn_q.scale", b"blk.0.attn_k.scale"),
            "attn_k.scale: expected each tensor once",
        ),
    ],
)
def test_a_damaged_file_is_refused_naming_it(tmp_path, change, message):
    path = write_by_hand(tmp_path, tiny_tensors()[0])
    raw = path.read_bytes()
    assert change(raw) != raw
    path.write_bytes(change(raw))

    with pytest.raises(QuantError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("kind", "shape", "raw", "message"),
    [
        (99, (1, 64), bytes(36), "w: expected a known tensor type, got 99"),
        (NVFP4, (1, 48), bytes(27), "w: expected rows of a multiple of 64 elements, got 48"),
        (0, (1, 1, 1, 1, 1), bytes(4), "w: expected at most 4 dimensions, got 5"),
        (0, (2**62, 2**62), bytes(4), "w: expected bytes .* to .*, got a file of"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path, kind, shape, raw, message):
    with pytest.raises(QuantError, match=message):
        open_gguf(write_by_hand(tmp_path, {"w": (kind, shape, raw)}))


def test_damaged_bytes_end_in_our_error_or_in_a_file(tmp_path):
    path = write_by_hand(tmp_path, tiny_tensors()[0])
    raw = path.read_bytes()
    random = np.random.default_rng(0)
    opened = 0
    for _ in range(300):
        damaged = bytearray(raw)
        for at in random.integers(0, 9000, random.integers(1, 4)):
            damaged[at] = random.choice([0, 1, 127, 255])
        path.write_bytes(damaged[: random.integers(1, len(raw)) if random.random() < 0.2 else None])
        try:
            open_gguf(path)
            opened += 1
        except QuantError as error:
            assert str(path) in str(error)

    assert 0 < opened < 300, "both kinds are among the inputs"
