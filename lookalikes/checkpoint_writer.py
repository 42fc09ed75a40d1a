"""Random shards with the names, dtypes and layout of compressed-tensors, and their index.

Weights have a standard deviation of about 1/sqrt(K), so that activations stay in float16's range. Device `meta` writes
files of the right names, headers and sizes, with holes for the numbers: enough for `voltserve plan`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUP = 16
DTYPES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


class Writer:
    """Shards, and their index."""

    def __init__(self, folder: Path, device: str, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.device = folder, device
        self.random = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        self.weight_map: dict[str, str] = {}
        self.total = 0

    def bytes_between(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Random uint8, low … high - 1."""
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.random)

    def linear(self, tensors: dict[str, torch.Tensor], name: str, rows: int, columns: int) -> None:
        """Codes uniform over all sixteen; block scales near 1; the divisor sets the deviation."""
        codes = self.bytes_between(0, 256, rows, columns // 2)
        # E4M3 0x38 is 1; 0x30 … 0x3F are 0.5 … 1.875.
        scales = self.bytes_between(0x30, 0x40, rows, columns // GROUP)
        # The root mean square of all 16 codes is 2.93, of these scales 1.16.
        divisor = 2.93 * 1.16 * columns**0.5
        tensors[f"{name}.weight_packed"] = codes
        tensors[f"{name}.weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_global_scale"] = torch.tensor([divisor], dtype=torch.float32)

    def dense(self, rows: int, columns: int, deviation: float) -> torch.Tensor:
        """A random float16 matrix."""
        made = torch.randn(rows, columns, device=self.device, generator=self.random, dtype=torch.float32)
        return made.mul_(deviation).half()

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """One shard."""
        if self.device == "meta":
            save_header(tensors, self.folder / name)
        else:
            on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
            save_file(on_host, self.folder / name, metadata={"format": "pt"})
        self.weight_map |= dict.fromkeys(tensors, name)
        self.total += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, config: dict[str, object]) -> None:
        """Index and config.json."""
        index = {"metadata": {"total_size": self.total}, "weight_map": self.weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.folder / "config.json").write_text(json.dumps(config, indent=1))


def save_header(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A sparse file with the header of `tensors`, and holes for their numbers."""
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
