"""Which of a hub's files serving needs, and why the others are left out. A name is judged, never trusted."""

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.constants import CONFIG, INDEX_NAME
from quant.safetensors_header import is_consolidated
from quant.verify.manifest import FILE_NAME as MANIFEST
from server.errors import HubError
from server.hub.listing import Listing, RemoteFile

SHARD = ".safetensors"
INDEX_LIMIT = 64 << 20  # bytes of an index of shards
_LONGEST_NAME = 200  # characters, with room for `.part`

# Files beside the weights that are kept: configs, tokenizers, chat templates, licences.
_KEPT = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICEN[CS]E*", "NOTICE*", "README.md", "*.md")
# The first pattern that fits gives the reason.
_LEFT_OUT = (
    ("*.py", "code, which is never run here"),
    ("*.bin.index.json", "pickled weights, which may run code when read"),
    ("*.bin", "pickled weights, which may run code when read"),
    ("*.pt", "pickled weights, which may run code when read"),
    ("*.pth", "pickled weights, which may run code when read"),
    ("*.ckpt", "pickled weights, which may run code when read"),
    ("*.gguf", "weights in another form"),
    ("*.onnx*", "weights in another form"),
    ("*.h5", "weights in another form"),
    ("*.msgpack", "weights in another form"),
    (".*", "hidden"),
    (MANIFEST, "a new one is written"),
)
_NOT_NEEDED = "not needed for serving"


@dataclass(frozen=True)
class LeftOut:
    """A file that is not fetched."""

    name: str
    size: int
    reason: str


@dataclass(frozen=True)
class Selection:
    """The files to fetch, smallest first, and those left out."""

    kept: tuple[RemoteFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(file.size for file in self.kept)

    @property
    def shards(self) -> tuple[RemoteFile, ...]:
        """The files of weights."""
        return tuple(file for file in self.kept if file.name.endswith(SHARD))


def index_of(listing: Listing) -> RemoteFile | None:
    """The index of shards, if the model has one."""
    return next((file for file in listing.files if file.name == INDEX_NAME), None)


def listed_shards(index: bytes, where: str) -> frozenset[str]:
    """The shards that an index's bytes name. Raises HubError."""
    try:
        shards = frozenset(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(
            f"{where}: {INDEX_NAME}: expected an object with weight_map, got {type(error).__name__}"
        ) from None
    for name in shards:
        if not isinstance(name, str) or not name.endswith(SHARD) or _unsafe(name):
            raise HubError(f"{where}: {INDEX_NAME}: expected shards' file names, got {str(name)[:100]!r}")
    return shards


def select(listing: Listing, shards: frozenset[str] | None) -> Selection:
    """Sorts a model's files; `shards`: those that its index names, None without one.

    Raises HubError where the model has no config, no weights in safetensors, or not all shards of its index.
    """
    candidates = {file.name for file in listing.files if file.name.endswith(SHARD) and not _unsafe(file.name)}
    weights = shards if shards is not None else _without_index(candidates)
    kept: dict[str, RemoteFile] = {}
    left_out = []
    for file in listing.files:
        if reason := _reason(file.name, weights, kept):
            left_out.append(LeftOut(file.name, file.size, reason))
        else:
            kept[file.name] = file
    _refuse_incomplete(listing, kept, weights)
    ordered = sorted(kept.values(), key=lambda file: (file.size, file.name))
    return Selection(tuple(ordered), tuple(sorted(left_out, key=lambda one: (-one.size, one.name))))


def _without_index(names: set[str]) -> frozenset[str]:
    return frozenset(name for name in names if not is_consolidated(name)) or frozenset(names)


def _reason(name: str, weights: frozenset[str], kept: Mapping[str, RemoteFile]) -> str:
    """Why a file is left out; "" for one that is kept."""
    if "/" in name and not any(map(_unsafe, name.split("/"))):
        return "in a folder"
    if unsafe := _unsafe(name):
        return unsafe
    if name in kept:
        return "named twice"
    if name.endswith(SHARD):
        again = "the weights once more" if is_consolidated(name) else "not in the index"
        return "" if name in weights else again
    if left := next((reason for pattern, reason in _LEFT_OUT if fnmatch.fnmatchcase(name, pattern)), ""):
        return left
    return "" if any(fnmatch.fnmatchcase(name, pattern) for pattern in _KEPT) else _NOT_NEEDED


def _unsafe(name: str) -> str:
    """Why this cannot be the name of a file in one folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        return "a name that leads elsewhere"
    if not name.isprintable() or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
        return "a name that is not safe"
    return ""


def _refuse_incomplete(listing: Listing, kept: Mapping[str, RemoteFile], weights: frozenset[str]) -> None:
    if missing := sorted(weights - kept.keys()):
        raise HubError(
            f"{listing}: expected the {len(weights)} shards of its index, got none of the name {missing[0]!r}; "
            "its upload is not complete"
        )
    if not weights:
        raise HubError(f"{listing}: expected *.safetensors files, got {_instead(listing.files)}; {_WEIGHTS}")
    if CONFIG not in kept:
        raise HubError(f"{listing}: expected {CONFIG}, got none; name a repository with a model, not an adapter")


_WEIGHTS = "choose a version of the model in safetensors"


def _instead(files: Sequence[RemoteFile]) -> str:
    largest = sorted(files, key=lambda file: -file.size)[:3]
    return ", ".join(repr(file.name[:80]) for file in largest) if largest else "no file"


def left_out_text(left_out: Sequence[LeftOut]) -> list[str]:
    """One line per reason: how many files, their bytes, the largest names."""
    by_reason: dict[str, list[LeftOut]] = {}
    for one in left_out:
        by_reason.setdefault(one.reason, []).append(one)
    return [
        f"left out, {reason}: {len(files)} files, {size_text(sum(one.size for one in files))} "
        f"({', '.join(repr(one.name[:60]) for one in files[:3])}{', …' if len(files) > 3 else ''})"
        for reason, files in by_reason.items()
    ]


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
