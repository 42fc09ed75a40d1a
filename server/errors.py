"""Errors that are the user's to fix: shown as one message without a traceback, with the exit code of their kind."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what was found, what was expected, what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A flag, environment variable or preset is unknown or malformed."""


class PreflightError(UserError):
    """The configuration is well formed, but it cannot be served on this machine."""


class ModelRefusedError(PreflightError):
    """The model directory cannot be served: damaged, or of a kind that no engine here computes."""

    exit_code = 65  # EX_DATAERR, as where the engine itself finds it (server/diagnosis/catalogue.py)


class HubError(UserError):
    """A hub, or the way to it, does not give what was asked for."""

    exit_code = 69  # EX_UNAVAILABLE


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Says that `name` is no known `kind`, naming the nearest valid ones, or all of them where there are few."""
    names = sorted(valid)
    plain = re.sub("[-_]", "", name).lower()
    near = [one for one in names if re.sub("[-_]", "", one).lower() == plain]
    near = near or difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"unknown {kind} {name!r}; did you mean {' or '.join(near)}?"
    if len(names) <= 12:
        return f"unknown {kind} {name!r}; valid: {', '.join(names)}"
    return f"unknown {kind} {name!r}, and none of the {len(names)} valid names is near it"
