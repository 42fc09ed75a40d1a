"""A command's model: a directory here, or the outline of a model on a hub."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quant.errors import QuantError
from server.errors import UserError

if TYPE_CHECKING:
    from server.hub.outline import Outline

T = TypeVar("T")

MODEL_HELP = "Model directory; or hf:OWNER/NAME, modelscope:OWNER/NAME or a folder's URL, of which headers are read."


@dataclass(frozen=True)
class Found:
    """Where a model's files are; `outline` is None for a directory of the user's."""

    directory: Path
    outline: "Outline | None" = None

    def renamed(self, value: T) -> T:
        """A text or JSON value in which the outline's folder, soon gone, is the model's name."""
        if self.outline is None:
            return value
        if isinstance(value, str):
            return self._in_text(value)
        return json.loads(self._in_text(json.dumps(value)))

    def _in_text(self, text: str) -> str:
        from server.hub.outline import named

        return named(text, self.outline) if self.outline else text


@contextmanager
def model_directory(text: str, endpoint: str = "", token_file: Path | None = None) -> Iterator[Found]:
    """The directory of the model that a command's argument names. What is read of a hub is said on stderr.

    Raises HubError. Errors of the body about an outline's folder name the model.
    """
    from server.hub.source import is_remote, parse_source

    if not is_remote(text):
        yield Found(Path(text))
        return
    from server.hub.outline import outline

    with outline(parse_source(text, endpoint, token_file)) as made:
        print(made.as_text(), file=sys.stderr)
        found = Found(made.directory, made)
        try:
            yield found
        except QuantError as error:
            raise QuantError(found.renamed(error.problem), error.remedy) from error
        except UserError as error:
            raise type(error)(found.renamed(str(error))) from error
