"""The files of a model directory: shards against their index, headers against sizes, what a tokenizer needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.errors import QuantError
from quant.jsonfile import field, read_object
from quant.safetensors_header import INDEX_NAME, Entry, Header, HeaderError, read_header
from quant.verify.findings import Finding, error, from_exception, list_some, warning

_FETCH = "Download the missing files from the model's source"
_AGAIN = "Download the model again; index and shards must be of the same version"

# Any one of these makes a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
_POINTER_LIMIT = 1024


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: its entry, the shard that holds it and where in the shard's file its bytes start."""

    entry: Entry
    shard: str
    offset: int


def read_shards(directory: Path) -> tuple[dict[str, Header], list[Finding]]:
    """The headers of all shards that can be read, by file name, and what is wrong with the set of shards."""
    findings: list[Finding] = []
    present = {path.name for path in directory.glob("*.safetensors") if path.is_file()}
    weight_map = _read_index(directory, findings)
    listed = set(weight_map.values()) if weight_map is not None else present
    if not listed:
        findings.append(error("shards", "", "", "*.safetensors files", "none", _FETCH))
    if weight_map is None and len(present) > 1:
        got = f"{len(present)} shards and no index"
        findings.append(error("index", INDEX_NAME, "", "an index of the shards", got, _FETCH))
    for name in sorted(listed - present):
        got = f"nothing ({len(listed & present)} of {len(listed)} shards are there)"
        findings.append(error("missing-shard", name, "", "a file, which the index names", got, _FETCH))
    extra = "Remove it, or restore the index"
    findings += [
        warning("extra-shard", name, "", "only shards that the index names", "another", extra)
        for name in sorted(present - listed)
    ]
    headers = {}
    for name in sorted(listed & present):
        header = _read_header(directory / name, findings)
        if header:
            headers[name] = header
    if weight_map is not None:
        findings += _compare(weight_map, headers)
    findings += _duplicates(headers)
    return headers, findings


def tensors_of(headers: Mapping[str, Header]) -> dict[str, Tensor]:
    """All tensors by name."""
    return {
        name: Tensor(entry, shard, header.data_start + entry.start)
        for shard, header in headers.items()
        for name, entry in header.entries.items()
    }


def check_tokenizer(directory: Path) -> list[Finding]:
    """Findings about the files that turn text into tokens, and about Git LFS pointers among the small files."""
    findings = []
    if not any((directory / name).is_file() for name in TOKENIZERS):
        findings.append(error("tokenizer", "", "", f"one of {', '.join(TOKENIZERS)}", "none", _FETCH))
    if (directory / "vocab.json").is_file() and not any(
        (directory / name).is_file() for name in ("tokenizer.json", "merges.txt")
    ):
        findings.append(error("tokenizer", "merges.txt", "", "a file, beside vocab.json", "nothing", _FETCH))
    if not (directory / "tokenizer_config.json").is_file():
        got = "nothing: special tokens and the chat template may be missing"
        findings.append(warning("tokenizer", "tokenizer_config.json", "", "a file", got, _FETCH))
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size < _POINTER_LIMIT:
            text = path.read_bytes()
            if text.startswith(b"version https://git-lfs"):
                got = f"a Git LFS pointer of {len(text)} bytes"
                findings.append(error("lfs-pointer", path.name, "", "the file", got, "Fetch it with `git lfs pull`"))
    return findings


def _read_header(path: Path, findings: list[Finding]) -> Header | None:
    try:
        return read_header(path)
    except HeaderError as caught:
        findings.append(from_exception("header", caught))
        return None


def _read_index(directory: Path, findings: list[Finding]) -> dict[str, str] | None:
    """The index's map from tensor to shard; None where there is no index or it cannot be read."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    try:
        weight_map = field(read_object(path, _AGAIN), "weight_map", dict, str(path), _AGAIN)
    except QuantError as caught:
        findings.append(from_exception("index", caught))
        return None
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            findings.append(error("index", INDEX_NAME, tensor, "a shard's file name", repr(shard), _AGAIN))
            return None
    return weight_map


def _compare(weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> list[Finding]:
    findings = []
    for shard, header in headers.items():
        listed = {name for name, owner in weight_map.items() if owner == shard}
        if missing := sorted(listed - header.entries.keys()):
            expected = f"the {len(listed)} tensors that the index names"
            findings.append(error("index", shard, missing[0], expected, f"no {list_some(missing)}", _AGAIN))
        if extra := sorted(header.entries.keys() - listed):
            expected = "only tensors that the index names for this shard"
            findings.append(error("index", shard, extra[0], expected, list_some(extra), _AGAIN))
    return findings


def _duplicates(headers: Mapping[str, Header]) -> list[Finding]:
    findings = []
    owner: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.entries:
            if name in owner:
                findings.append(error("duplicate", shard, name, "each tensor once", f"it in {owner[name]} too", _AGAIN))
            owner[name] = shard
    return findings
