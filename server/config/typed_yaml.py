"""Reads a YAML file that the command line names, as a typed value."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from server.errors import ConfigError

Content = TypeVar("Content", bound=BaseModel)


def read_yaml(kind: type[Content], path: Path, flag: str) -> Content:
    """The content of the file at `path`.

    Args:
        kind: the type that it must have.
        path: the file.
        flag: the flag that named it, for errors.

    Raises:
        ConfigError: missing or malformed; names the first key that is wrong.
    """
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: {path} is not YAML: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "file"
        given = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
        raise ConfigError(f"{flag}: {path}: {where}: {problem['msg']}{given}") from error
