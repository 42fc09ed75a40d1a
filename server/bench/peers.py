"""The reference document's figures and peers' own (configs/peers.yaml), to be shown beside ours as theirs."""

import functools
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.errors import ConfigError

PEERS_FILE = Path(__file__).parents[2] / "configs" / "peers.yaml"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reference(_Strict):
    """The reference document's table: total tokens per second by users, and the range of its TTFT in milliseconds."""

    title: str
    tokens_per_s: dict[int, float]
    ttft_ms: tuple[float, float]
    note: str


class Peer(_Strict):
    """One peer's claim: total tokens per second by users."""

    who: str
    setup: str
    tokens_per_s: dict[int, float]


class Peers(_Strict):
    """The file."""

    schema_version: Literal[1] = Field(alias="schema")
    reference: Reference
    peers: tuple[Peer, ...]


@functools.cache
def load_peers(path: Path = PEERS_FILE) -> Peers:
    """The file's contents.

    Raises:
        ConfigError: it is not such a file.
    """
    try:
        return Peers.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
