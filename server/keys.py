"""API keys: a file of names, SHA-256 digests and limits, read by the gateway and written by `voltserve keys`.

A key is 256 random bits. Its digest is one unsalted SHA-256. Salts and slow hashes protect passwords that people
choose. For secrets of at least 112 bits of entropy NIST SP 800-63B (5.1.2.2) asks only for an approved one-way hash.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.errors import ConfigError, unknown_name

PREFIX = "vs-"
KEY_BYTES = 32
PRIVATE = 0o600

log = structlog.get_logger("voltserve.keys")


class Limits(BaseModel):
    """The limits of a key. For requests, None means serve's own limit; for the others, None means no limit.

    `expires` is the last valid day (UTC). `models` are the names that requests may ask for. `tokens_per_day` counts
    prompts and answers from 00:00 UTC on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Annotated[int, Field(ge=0)] | None = None
    max_concurrent: Annotated[int, Field(ge=0)] | None = None
    expires: date | None = None
    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    tokens_per_day: Annotated[int, Field(gt=0)] | None = None


class ApiKey(Limits):
    """One key."""

    name: Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: datetime


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    keys: tuple[ApiKey, ...] = ()


def digest(key: str) -> str:
    """The digest that is stored instead of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it is missing, readable by others, or malformed.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"API keys: {path}: {error.strerror}; make it with `voltserve keys add NAME`") from error
    if mode & 0o077:
        raise ConfigError(f"API keys: {path} has mode {mode:o}, open to other users; run: chmod 600 {path}")
    try:
        keys = _KeyFile.model_validate_json(text).keys
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"API keys: {path}: {where or 'file'}: {problem['msg']}") from error
    names = [key.name for key in keys]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"API keys: {path}: the name {min(twice)!r} comes twice")
    return keys


def add_key(path: Path, name: str, **limits: object) -> str:
    """Adds a key, making the file where there is none. Returns the key, which is written nowhere.

    Args:
        path: the file.
        name: whom the key is for.
        limits: fields of `Limits`.

    Raises:
        ConfigError: the name is taken or malformed, a limit is, or the file is (see `read_keys`).
    """
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with _locked(path):
        keys = read_keys(path) if path.exists() else ()
        if name in {one.name for one in keys}:
            raise ConfigError(f"API keys: {path} has a key named {name!r}; revoke it first, or take another name")
        created = datetime.now(timezone.utc).replace(microsecond=0)
        added = _checked(name, {"name": name, "sha256": digest(key), "created": created, **limits})
        _write(path, (*keys, added))
    return key


def change_key(path: Path, name: str, **limits: object) -> tuple[ApiKey, ApiKey]:
    """Changes limits of a key; those not named stay, as does the key itself. Returns it as it was and as it is.

    Args:
        path: the file.
        name: whose key.
        limits: fields of `Limits`; None takes the limit away.

    Raises:
        ConfigError: there is no key of this name, a limit is malformed, or the file is (see `read_keys`).
    """
    with _locked(path):
        keys = read_keys(path)
        before = _named(path, keys, name)
        now = _checked(name, before.model_dump() | limits)
        if now != before:
            _write(path, tuple(now if key is before else key for key in keys))
    return before, now


def _named(path: Path, keys: tuple[ApiKey, ...], name: str) -> ApiKey:
    for key in keys:
        if key.name == name:
            return key
    raise ConfigError(f"API keys: {path}: {unknown_name('key', name, [key.name for key in keys])}")


def _checked(name: str, fields: dict[str, object]) -> ApiKey:
    try:
        return ApiKey.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"API key {name!r}: {problem['loc'][0]}: {problem['msg']}") from error


def revoke_key(path: Path, name: str) -> None:
    """Removes a key; a running gateway refuses it within a second.

    Raises:
        ConfigError: there is no key of this name, or the file is malformed.
    """
    with _locked(path):
        keys = read_keys(path)
        revoked = _named(path, keys, name)
        _write(path, tuple(key for key in keys if key is not revoked))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time. The lock is the folder's: the file itself is replaced by each write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"API keys: {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    """Replaces the file as a whole, so that a gateway reads the old keys or the new."""
    text = _KeyFile(keys=keys).model_dump_json(indent=2, by_alias=True, exclude_none=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.touch(PRIVATE, exist_ok=False)
        with partial.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"API keys: {path} cannot be written: {error.strerror}") from error


class KeysUnreadableError(Exception):
    """The file of keys cannot be used, so every request is refused."""


class KeyRing:
    """The keys of a file, read again when it changes.

    Raises:
        ConfigError: the file cannot be used at start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._version()
        self._keys = read_keys(path)
        self._problem = ""

    @property
    def names(self) -> frozenset[str]:
        """The keys there are, as last read."""
        return frozenset(key.name for key in self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that `presented` is, or None. Compares with every key, in a time that reveals nothing about any key.

        Raises:
            KeysUnreadableError: the file has become unusable. Former keys are not used: one of them may be revoked.
        """
        self._reload()
        if self._problem:
            raise KeysUnreadableError(self._problem)
        wanted = digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, wanted):
                found = key
        return found

    def _reload(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        try:
            before, self._keys, self._problem = self._keys, read_keys(self._path), ""
            _audit(before, self._keys)
            log.info("API keys read again", keys=len(self._keys))
        except ConfigError as error:
            self._problem = str(error)
            log.error("API keys unusable; every request is refused", problem=self._problem)  # noqa: TRY400

    def _version(self) -> tuple[int, ...]:
        """Changes with the file's content or mode; empty where it is missing."""
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


def _audit(before: tuple[ApiKey, ...], after: tuple[ApiKey, ...]) -> None:
    """Logs each key that was added, revoked or changed, by name."""
    old, new = ({key.name: key for key in keys} for keys in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            log.info("API key added", key=name)
        elif name not in new:
            log.info("API key revoked", key=name)
        elif old[name].sha256 != new[name].sha256:
            log.info("API key replaced", key=name)
        elif old[name] != new[name]:
            log.info("API key changed", key=name, **changes(old[name], new[name]))


def changes(before: ApiKey, now: ApiKey) -> dict[str, dict[str, object]]:
    """What differs, but for the digest: the limits as they were and as they are, None where there is none."""
    old, new = (key.model_dump(mode="json", exclude={"sha256"}) for key in (before, now))
    fields = [field for field in old if old[field] != new[field]]
    return {"before": {field: old[field] for field in fields}, "now": {field: new[field] for field in fields}}
