"""What a replica and a gateway say to each other over TCP: a greeting, then either the engine's HTTP or lines of JSON.

A connection begins with `voltserve/1 SECRET PURPOSE`, a line. With PURPOSE `engine`, all further bytes go to and from
the engine's socket. With PURPOSE `status`, the replica sends one line with its configuration, one per change of its
status, and one every second. So silence means that the replica, or the network to it, is down. Every second the gateway
sends the number of requests that it has for this replica.
"""

import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from server.config.settings import Config
from server.decisions import Decision
from server.diagnosis import Diagnosis
from server.gateway.gpu_metrics import Reading
from server.supervisor import Progress, State, Status

PULSE = 1.0  # seconds between two lines at least
MAX_LINE = 2**20  # bytes; a configuration is some kilobytes
MAX_GREETING = 256  # bytes
_PROTOCOL = b"voltserve/1"

Purpose = Literal["engine", "status"]


def greeting(secret: str, purpose: Purpose) -> bytes:
    """The first line of a connection."""
    return b"%b %b %b\n" % (_PROTOCOL, secret.encode("ascii"), purpose.encode("ascii"))


def purpose_of(line: bytes, secret: str) -> Purpose | None:
    """A connection's purpose, from its first line; None where it is not ours or lacks the secret."""
    words = line.split()
    if len(words) != 3 or words[0] != _PROTOCOL or not hmac.compare_digest(words[1], secret.encode("ascii")):
        return None
    known: dict[bytes, Purpose] = {b"engine": "engine", b"status": "status"}
    return known.get(words[2])


def line(**message: Any) -> bytes:
    """One message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def config_message(config: Config) -> dict[str, Any]:
    """A replica's configuration, for `config_from`."""
    return config.model_dump(mode="json")


def config_from(message: Mapping[str, Any]) -> Config:
    """The configuration in a message."""
    return Config.model_validate(message)


def status_message(status: Status) -> dict[str, Any]:
    """A status for `status_from`. Clocks differ between machines, so times are sent relative to now."""
    now = time.monotonic()
    message = {field.name: getattr(status, field.name) for field in fields(status)}
    for name in ("since", "started_at", "retry_at"):
        message[name] = None if message[name] is None else message[name] - now
    for name in ("progress", "diagnosis"):
        message[name] = None if message[name] is None else asdict(message[name])
    message["decisions"] = [asdict(decision) for decision in status.decisions]
    return message


def status_from(message: Mapping[str, Any]) -> Status:
    """The status in a message."""
    now = time.monotonic()
    found = dict(message)
    for name in ("since", "started_at", "retry_at"):
        found[name] = None if found[name] is None else found[name] + now
    found["state"] = State(found["state"])
    found["progress"] = Progress(**found["progress"]) if found["progress"] else None
    if found["diagnosis"]:
        found["diagnosis"] = Diagnosis(**{**found["diagnosis"], "remedy": tuple(found["diagnosis"]["remedy"])})
    found["decisions"] = tuple(Decision(**decision) for decision in found["decisions"])
    found["warnings"] = tuple(found["warnings"])
    return Status(**found)


def gpu_messages(readings: list[Reading]) -> list[dict[str, Any]]:
    """GPUs for `gpus_from`."""
    return [asdict(reading) for reading in readings]


def gpus_from(messages: list[dict[str, Any]], replica: str) -> list[Reading]:
    """The GPUs in a message, with their replica's name in the index."""
    own = ({"index": f"{replica}/{message['index']}", "throttle": tuple(message["throttle"])} for message in messages)
    return [Reading(**{**message, **changed}) for message, changed in zip(messages, own, strict=True)]
