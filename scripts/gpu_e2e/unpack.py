"""Restores the model directory of pack.py's parts: `unpack.py PARTS_FOLDER MODEL_DIRECTORY`."""

import io
import lzma
import sys
import tarfile
from pathlib import Path

from safetensors.torch import load_file, save_file


def main() -> None:
    """Writes the directory."""
    parts, model = map(Path, sys.argv[1:])
    data = b"".join(path.read_bytes() for path in sorted(parts.glob("model.[0-9][0-9]")))
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as tar:
        tar.extractall(model, filter="data")
    packed = model / "packed.safetensors"
    tensors = load_file(packed)
    codes, scale = tensors.pop("embedding.codes"), tensors.pop("embedding.scale")
    blocks = (codes.reshape(len(scale), -1).float() * scale.float()).half()
    tensors["model.embed_tokens.weight"] = blocks.reshape(codes.shape)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    packed.unlink()


if __name__ == "__main__":
    main()
