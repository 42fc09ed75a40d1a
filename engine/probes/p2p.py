"""`python -m engine.probes.p2p`: writes through peer memory between every pair of GPUs and reads it back.

On some boards peer-to-peer over PCIe reports success but delivers wrong bytes, so only a comparison counts. The probe
also prints the GPU architectures that the installed torch has machine code for.
"""

import argparse
import json
import time
from typing import Any

import torch

SIZES = (4 * 2**10, 64 * 2**20)  # bytes: a small transfer and one that takes several DMA requests
_ROUNDS = 3


def main() -> None:
    """Prints {torch, architectures, gpus, pairs: [{source, destination, peer_access, wrong, bytes, gb_per_s}]}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count(), help="try the first so many GPUs")
    count = parser.parse_args().devices
    pairs = [
        {"source": source, "destination": destination, **try_pair(f"cuda:{source}", f"cuda:{destination}")}
        for source in range(count)
        for destination in range(count)
        if source != destination
    ]
    architectures = torch.cuda.get_arch_list()
    print(json.dumps({"torch": torch.__version__, "architectures": architectures, "gpus": count, "pairs": pairs}))


def try_pair(source: str, destination: str) -> dict[str, Any]:
    """Copies from one device to another. Returns {peer_access, wrong, bytes, gb_per_s}.

    `wrong` counts changed elements over all rounds and sizes. `bytes` and `gb_per_s` are of the largest size.
    """
    access = None
    if source.startswith("cuda"):
        access = torch.cuda.can_device_access_peer(torch.device(source), torch.device(destination))
    wrong = sum(copy_and_compare(source, destination, size, seed) for size in SIZES for seed in range(_ROUNDS))
    return {"peer_access": access, "wrong": wrong, "bytes": SIZES[-1], "gb_per_s": _speed(source, destination)}


def copy_and_compare(source: str, destination: str, size: int, seed: int) -> int:
    """How many of `size` / 4 int32 elements arrive changed. The comparison is made on the host."""
    generator = torch.Generator().manual_seed(seed)
    sent = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, generator=generator)
    there = sent.to(source)
    arrived = torch.zeros_like(sent, device=destination)  # zeros, so that a lost write is seen
    arrived.copy_(there)
    _wait(source, destination)
    return int((arrived.cpu() != sent).sum())


def _speed(source: str, destination: str) -> float:
    """10^9 bytes per second for the largest size, the best of a few rounds."""
    data = torch.zeros(SIZES[-1] // 4, dtype=torch.int32, device=source)
    target = torch.zeros_like(data, device=destination)
    best = 0.0
    for _ in range(_ROUNDS):
        _wait(source, destination)
        began = time.perf_counter()
        target.copy_(data)
        _wait(source, destination)
        best = max(best, SIZES[-1] / (time.perf_counter() - began) / 1e9)
    return round(best, 2)


def _wait(*devices: str) -> None:
    for device in devices:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
