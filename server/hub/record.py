"""What a directory that was fetched says of itself, and an unfinished one of its state: small JSON files in it."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from server.errors import HubError
from server.hub.listing import Listing, RemoteFile
from server.hub.selection import Selection
from server.hub.source import Source, shown_url

# Hidden, so that SHA256SUMS and verify leave them alone.
RECORD = ".voltserve-source.json"
STATE = ".voltserve-fetch.json"


@dataclass(frozen=True)
class Done:
    """A file that is whole: its digest, and its size and time of change when that was found."""

    sha256: str
    size: int
    mtime_ns: int


@dataclass
class State:
    """An unfinished fetch: its source and revision, each file's version, and which files are whole."""

    source: str
    asked: str
    revision: str
    versions: dict[str, str] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)

    def digest_of(self, folder: Path, file: RemoteFile) -> str | None:
        """The digest of a file that is whole and unchanged since; None otherwise."""
        known = self.done.get(file.name)
        if known is None or (file.sha256 and file.sha256.lower() != known.sha256):
            return None
        try:
            seen = os.lstat(folder / file.name)
        except OSError:
            return None
        unchanged = (seen.st_size, seen.st_mtime_ns) == (known.size, known.mtime_ns) and seen.st_size == file.size
        return known.sha256 if unchanged else None

    def note(self, folder: Path, name: str, sha256: str) -> None:
        """Remembers that a file is whole."""
        seen = os.lstat(folder / name)
        done = Done(sha256, seen.st_size, seen.st_mtime_ns)
        if self.done.get(name) != done:
            self.done[name] = done
            self.save(folder)

    def save(self, folder: Path) -> None:
        """Writes the state, whole or not at all."""
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(folder / STATE)


def key_of(source: Source) -> str:
    """The same for a model whatever mirror it is fetched from."""
    return str(source.at(""))


def read_state(folder: Path) -> State | None:
    """The state of an unfinished fetch; None where a kill left none. Raises HubError for a folder of another."""
    data = _read(folder / STATE)
    if data is None:
        return None
    try:
        done = {str(name): Done(**one) for name, one in data["done"].items()}
        versions = {str(name): str(version) for name, version in data["versions"].items()}
        return State(str(data["source"]), str(data["asked"]), str(data["revision"]), versions, done)
    except (KeyError, TypeError, AttributeError):
        return None


def read_record(directory: Path) -> dict[str, Any] | None:
    """What a directory says of its source; None where it was not fetched by this program."""
    return _read(directory / RECORD)


def write_record(folder: Path, listing: Listing, selection: Selection, digests: dict[str, str]) -> None:
    """Says where the files in `folder` are from."""
    source = listing.source
    data = {
        "source": key_of(source),
        "asked": source.revision,
        "revision": listing.revision,
        "endpoint": shown_url(source.endpoint) if source.endpoint else "",
        "files": {file.name: {"size": file.size, "sha256": digests[file.name]} for file in selection.kept},
        "left_out": [asdict(one) for one in selection.left_out],
    }
    (folder / RECORD).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path}: expected a JSON object, got {error}; remove it and run this again") from None
    return data if isinstance(data, dict) else None
