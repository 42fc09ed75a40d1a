"""Checks the files of a model directory: shards against the index, headers against sizes, a tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.constants import GENERATION_CONFIG, INDEX_NAME, TOKENIZER_CONFIG
from quant.errors import QuantError
from quant.jsonfile import field, read_object, show
from quant.safetensors_header import (
    LFS_POINTER,
    Entry,
    Header,
    HeaderError,
    is_consolidated,
    read_header,
    unindexed_shards,
)
from quant.verify.findings import Finding, error, from_exception, list_some, warning
from quant.verify.outline import holes_of

_FETCH = "Download the missing files from the model's source"
_AGAIN = "Download the model again; index and shards must be of the same version"

# Each of these suffices for a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
# Files of weights that are not read: a pattern, and the remedy.
_OTHER_WEIGHTS = (
    ("*.gguf", "Make a model directory of it with `voltserve convert FILE.gguf DIR --format modelopt`"),
    ("*.bin", "Choose a version of the model in safetensors: pickled files may run code when they are read"),
    ("*.pt*", "Choose a version of the model in safetensors: pickled files may run code when they are read"),
)
_POINTER_LIMIT = 1024
# Files that transformers reads beside config.json, for the tokenizer and sampling defaults.
_READ_AS_JSON = (GENERATION_CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: its entry, the shard that holds it and where in the shard's file its bytes start."""

    entry: Entry
    shard: str
    offset: int


def read_shards(directory: Path) -> tuple[dict[str, Header], list[Finding]]:
    """The headers of all readable shards, by file name, and findings about the set of shards."""
    findings: list[Finding] = []
    present = {path.name for path in directory.glob("*.safetensors") if path.is_file()}
    weight_map = _read_index(directory, findings)
    listed = set(weight_map.values()) if weight_map is not None else set(unindexed_shards(directory))
    if not listed:
        findings.append(_no_shards(directory))
    if weight_map is None and len(listed) > 1:
        got = f"{len(listed)} shards and no index"
        findings.append(error("index", INDEX_NAME, "", "an index of the shards", got, _FETCH))
    for name in sorted(listed - present):
        got = f"nothing ({len(listed & present)} of {len(listed)} shards are there)"
        findings.append(error("missing-shard", name, "", "a file, which the index names", got, _FETCH))
    if twice := sorted(name for name in present - listed if is_consolidated(name)):
        got = f"the weights once more in {list_some(twice)}"
        remedy = "None needed: consolidated files are ignored; removing them saves their room"
        findings.append(warning("extra-shard", twice[0], "", "each weight once", got, remedy))
    extra = "Remove it, or restore the index"
    findings += [
        warning("extra-shard", name, "", "only shards that the index names", "another", extra)
        for name in sorted(present - listed - set(twice))
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


def check_tokenizer(directory: Path, config: Mapping[str, object]) -> list[Finding]:
    """Findings about the tokenizer's files. `config` is the model's, for the size of its vocabulary."""
    findings = []
    present = [name for name in TOKENIZERS if (directory / name).is_file()]
    if not present and not any(directory.glob("*.tiktoken")):
        findings.append(error("tokenizer", "", "", f"one of {', '.join(TOKENIZERS)}", "none", _FETCH))
    if "vocab.json" in present and not any((directory / name).is_file() for name in ("tokenizer.json", "merges.txt")):
        findings.append(error("tokenizer", "merges.txt", "", "a file, beside vocab.json", "nothing", _FETCH))
    findings += [
        error("tokenizer", name, "", "a tokenizer", "an empty file", _FETCH)
        for name in present
        if not (directory / name).stat().st_size
    ]
    if not (directory / TOKENIZER_CONFIG).is_file():
        got = "nothing: special tokens and the chat template may be missing"
        findings.append(warning("tokenizer", TOKENIZER_CONFIG, "", "a file", got, _FETCH))
    path = directory / "tokenizer.json"
    read = path.name not in holes_of(directory)
    if read and path.is_file() and path.stat().st_size and not _is_pointer(path):
        findings += _check_vocabulary(path, config)
    return findings


def _check_vocabulary(path: Path, config: Mapping[str, object]) -> list[Finding]:
    """Checks that a tokenizer.json has tokens, and no more than the model has rows."""
    try:
        data = read_object(path, _FETCH)
        vocabulary = field(data, "model", dict, str(path), _FETCH).get("vocab")
    except QuantError as caught:
        return [from_exception("tokenizer", caught)]
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        got = "nothing" if vocabulary is None else show(vocabulary)
        return [error("tokenizer", f"{path.name}: model: vocab", "", "tokens", got, _FETCH)]
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if isinstance(vocabulary, dict):
        last = max((number for number in vocabulary.values() if isinstance(number, int)), default=0)
        if isinstance(rows, int) and last >= rows:
            expected = f"tokens below {rows}, config.json's vocab_size"
            remedy = "Check that tokenizer and model are of the same version"
            return [warning("tokenizer", path.name, "", expected, f"token {last}", remedy)]
    return []


def check_json_files(directory: Path) -> list[Finding]:
    """Finds small files that are Git LFS pointers, and malformed JSON that the engine would read."""
    findings = []
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.suffix == ".safetensors":
            continue
        if _is_pointer(path):
            got = f"a Git LFS pointer of {path.stat().st_size} bytes"
            findings.append(error("lfs-pointer", path.name, "", "the file", got, "Fetch it with `git lfs pull`"))
        elif path.name in _READ_AS_JSON:
            try:
                read_object(path, _FETCH)
            except QuantError as caught:
                findings.append(from_exception("json", caught))
    return findings


def _is_pointer(path: Path) -> bool:
    return path.stat().st_size < _POINTER_LIMIT and path.read_bytes().startswith(LFS_POINTER)


def _no_shards(directory: Path) -> Finding:
    for pattern, remedy in _OTHER_WEIGHTS:
        if found := sorted(path.name for path in directory.glob(pattern)):
            return error("shards", found[0], "", "*.safetensors files", list_some(found, 3), remedy)
    return error("shards", "", "", "*.safetensors files", "none", _FETCH)


def _read_header(path: Path, findings: list[Finding]) -> Header | None:
    try:
        return read_header(path)
    except HeaderError as caught:
        findings.append(from_exception("header", caught))
        return None


def _read_index(directory: Path, findings: list[Finding]) -> dict[str, str] | None:
    """The index's map from tensor to shard. None if there is no readable index."""
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
    of_shard: dict[str, set[str]] = {}
    for name, owner in weight_map.items():
        of_shard.setdefault(owner, set()).add(name)
    for shard, header in headers.items():
        listed = of_shard.get(shard, set())
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
