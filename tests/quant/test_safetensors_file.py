import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.constants import INDEX_NAME
from quant.errors import QuantError
from quant.safetensors_file import DTYPES, ShardWriter, TensorInfo, open_checkpoint, write_index

SAMPLE = {
    "packed": torch.arange(3, dtype=torch.uint8).view(1, 3),
    "scale": torch.tensor([0.5, -0.0, 448.0]).to(torch.float8_e4m3fn),
    "half": torch.tensor([[1.5, -2.0]]).half(),
    "brain": torch.tensor([3.0]).to(torch.bfloat16),
    "global": torch.tensor([0.1]),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def write_sample(path, tensors=SAMPLE):
    with ShardWriter(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def assert_same(tensor, expected):
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def sharded(directory):
    """Two shards of one tensor each, and their index."""
    save_file({"a": torch.ones(2)}, directory / "one.safetensors")
    save_file({"b": torch.zeros(3)}, directory / "two.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    return directory


def test_the_library_reads_what_the_writer_wrote(tmp_path):
    write_sample(tmp_path / "model.safetensors")

    loaded = load_file(tmp_path / "model.safetensors")

    assert loaded.keys() == SAMPLE.keys()
    for name, tensor in SAMPLE.items():
        assert_same(loaded[name], tensor)


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path):
    write_sample(tmp_path / "model.safetensors")

    raw = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])

    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % SAMPLE[name].dtype.itemsize == 0, name


def test_a_tensor_that_is_a_view_is_written_as_it_reads(tmp_path):
    view = torch.arange(6.0).view(2, 3).T
    write_sample(tmp_path / "model.safetensors", {"view": view})

    assert_same(load_file(tmp_path / "model.safetensors")["view"], view.contiguous())


def test_reading_gives_every_tensor_and_what_the_header_says(tmp_path):
    save_file(SAMPLE, tmp_path / "model.safetensors")

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.shards == ("model.safetensors",)
    assert checkpoint.tensors["half"] == TensorInfo(torch.float16, (1, 2), "model.safetensors")
    assert checkpoint.tensors["half"].nbytes == 4
    read = dict(checkpoint.read("model.safetensors", checkpoint.names("model.safetensors")))
    assert read.keys() == SAMPLE.keys()
    for name, tensor in SAMPLE.items():
        assert_same(read[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_written_and_read(tmp_path, dtype):
    tensor = torch.tensor([0, 1]).to(dtype)
    write_sample(tmp_path / "model.safetensors", {"t": tensor})

    ((_, read),) = open_checkpoint(tmp_path).read("model.safetensors", ["t"])

    assert_same(read, tensor)


def test_the_writer_s_index_is_read_back(tmp_path):
    sharded(tmp_path)
    tensors = open_checkpoint(tmp_path).tensors
    (tmp_path / INDEX_NAME).unlink()

    write_index(tmp_path, tensors)

    assert open_checkpoint(tmp_path).tensors == tensors
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"] == {"total_size": 20}


def test_a_tensor_left_out_is_reported_when_the_shard_is_closed(tmp_path):
    def incomplete():
        with ShardWriter(tmp_path / "model.safetensors", {"a": (torch.float32, (1,))}):
            pass

    with pytest.raises(ValueError, match="expected all tensors to be written, a was not"):
        incomplete()


def test_an_error_while_writing_is_not_hidden_by_what_is_missing(tmp_path):
    def failing():
        with ShardWriter(tmp_path / "model.safetensors", {"a": (torch.float32, (1,))}):
            raise RuntimeError("the real one")

    with pytest.raises(RuntimeError, match="the real one"):
        failing()


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.ones(1).half()])
def test_a_tensor_other_than_announced_is_refused(tmp_path, tensor):
    def wrong():
        with ShardWriter(tmp_path / "model.safetensors", {"a": (torch.float32, (1,))}) as writer:
            writer.write("a", tensor)

    with pytest.raises(ValueError, match=r"a: expected \(torch\.float32, \(1,\)\) once, got"):
        wrong()


def test_a_tensor_written_twice_or_unannounced_is_refused(tmp_path):
    with ShardWriter(tmp_path / "model.safetensors", {"a": (torch.float32, (1,))}) as writer:
        writer.write("a", torch.ones(1))
        for name in ("a", "b"):
            with pytest.raises(ValueError, match=f"{name}: expected .* once, got"):
                writer.write(name, torch.ones(1))


@pytest.mark.parametrize("count", [0, 2])
def test_without_an_index_there_must_be_one_shard(tmp_path, count):
    for number in range(count):
        save_file(SAMPLE, tmp_path / f"{number}.safetensors")

    with pytest.raises(QuantError, match=rf"expected {INDEX_NAME} or one \*\.safetensors file, got {count}"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    (sharded(tmp_path) / "two.safetensors").unlink()

    with pytest.raises(QuantError, match=r"two\.safetensors: expected a file, got nothing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:20],
        lambda raw: b"",
        lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        lambda raw: struct.pack("<Q", 1 << 62) + raw[8:],
    ],
    ids=["truncated data", "truncated header", "empty", "LFS pointer", "hostile length"],
)
def test_a_damaged_shard_is_named(tmp_path, damage):
    path = sharded(tmp_path) / "two.safetensors"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(QuantError, match=r"two\.safetensors: expected .*, got"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
            r"c is in the index but not in the shard",
        ),
        ({"b": "two.safetensors", "c": "one.safetensors"}, r"one\.safetensors: a is in the shard but not in the index"),
        ({"a": "../one.safetensors"}, r"a: expected a file name, got '\.\./one\.safetensors'"),
        ({"a": 1}, r"a: expected a file name, got 1"),
        ([], r"weight_map: expected an object, got \[\]"),
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path, weight_map, message):
    (sharded(tmp_path) / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(QuantError, match=message):
        open_checkpoint(tmp_path)


def test_a_dtype_that_is_not_known_is_named(tmp_path):
    save_file({"c": torch.zeros(1, dtype=torch.complex64)}, tmp_path / "model.safetensors")

    with pytest.raises(QuantError, match=r"model\.safetensors: c: expected one of F64, .*, got C64"):
        open_checkpoint(tmp_path)
