"""Results kept beside an unfinished output, so that a stopped run resumes.

The folder `.NAME.resume` stands beside the output NAME. It holds `inputs.json`, which says what the results depend on,
and one safetensors file per result. A run with different inputs starts again.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quant.atomic import lock_folder
from quant.errors import QuantError

_INPUTS = "inputs.json"


class PartialResults:
    """Named groups of tensors, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps `tensors` under `name`."""
        path = self._path(name)
        unfinished = path.with_suffix(".unfinished")
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished)
        unfinished.rename(path)

    def remove(self, name: str) -> None:
        """Forgets what was kept under `name`, if anything."""
        self._path(name).unlink(missing_ok=True)

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """What was kept under `name`. Raises QuantError when the file is damaged."""
        with self._opened(name) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict

    def load_one(self, name: str, key: str) -> torch.Tensor:
        """One of the tensors kept under `name`; the others are not read."""
        with self._opened(name) as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise QuantError(f"{path}: expected kept results, got: {error}", "Run this again") from None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


@contextmanager
def partial_results(destination: Path, inputs: Mapping[str, object]) -> Iterator[PartialResults]:
    """The results kept for `destination` by an earlier run with equal `inputs` (JSON values), else none.

    They are removed when the body succeeds, and when it raises QuantError, which another run would only repeat. After
    any other end (Ctrl-C, a full disk, a kill) they stay for the next run. Raises QuantError while another run makes
    `destination`.
    """
    folder = resume_folder(destination)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    if lock is None:
        raise QuantError(f"{folder} is in use: another run is making {destination}", "Wait for it, or stop it first")
    try:
        yield from _kept(folder, inputs)
    finally:
        os.close(lock)


def resume_folder(destination: Path) -> Path:
    """Where an unfinished run keeps its results."""
    return destination.parent / f".{destination.name}.resume"


def _kept(folder: Path, inputs: Mapping[str, object]) -> Iterator[PartialResults]:
    text = json.dumps(inputs, indent=2, sort_keys=True)
    written = folder / _INPUTS
    if not written.exists() or written.read_text(encoding="utf-8") != text:
        for path in folder.iterdir():  # the folder itself stays, since it is locked
            path.unlink()
        written.write_text(text, encoding="utf-8")
    try:
        yield PartialResults(folder)
    except QuantError:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
