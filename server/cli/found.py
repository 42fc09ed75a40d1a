"""A command's model: a directory here, or the outline of a model on a hub."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.errors import QuantError
from server.errors import UserError

if TYPE_CHECKING:
    from server.hub.outline import Outline

MODEL_HELP = "Model directory; or hf:OWNER/NAME, modelscope:OWNER/NAME or a folder's URL, of which headers are read."


@dataclass(frozen=True)
class Found:
    """Where a model's files are; `outline` is None for a directory of the user's."""

    directory: Path
    outline: "Outline | None" = None

    def text(self, text: str) -> str:
        """A text in which the outline's folder, soon gone, is the model's name."""
        if self.outline is None:
            return text
        return text.replace(str(self.directory), str(self.outline.listing))

    def json(self, value: dict[str, Any]) -> dict[str, Any]:
        """The same in the texts of a JSON object."""
        return dict(json.loads(self.text(json.dumps(value))))


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
            raise QuantError(found.text(error.problem), error.remedy) from error
        except UserError as error:
            raise type(error)(found.text(str(error))) from error
