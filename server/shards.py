"""Whether the weights' files are whole, before an engine takes half a minute to find that one is cut off."""

from pathlib import Path

from quant.errors import QuantError
from quant.safetensors_header import INDEX_NAME
from server.diagnosis.catalogue import EXIT_CODES
from server.errors import PreflightError
from server.plan.model import read_entries


class DamagedShardError(PreflightError):
    """A weights file does not hold what its header says; ends serve as the engine's own complaint would."""

    exit_code = EXIT_CODES["model"]


def check_shards(model: Path) -> None:
    """Checks that each safetensors file that the engine will read is as long as its header says. Reads headers only.

    Raises:
        DamagedShardError: names the file, the bytes expected and got, and what to do.
    """
    if not (model / INDEX_NAME).exists() and not any(model.glob("*.safetensors")):
        return  # a model in another format
    try:
        read_entries(model)
    except QuantError as error:
        raise DamagedShardError(f"{error}. `voltserve verify {model}` checks every file") from error
