"""config.json of a model directory; a LoRA adapter's folder, which is none, is told apart."""

from pathlib import Path

from quant.constants import CONFIG
from quant.errors import QuantError
from quant.jsonfile import read_object

_REMEDY = "Name a model directory: config.json, safetensors shards and tokenizer files"
_ADAPTER = "adapter_config.json"


def read_model_config(directory: Path) -> dict[str, object]:
    """The object in config.json. Raises QuantError where it is missing or malformed, and for a LoRA adapter."""
    _refuse_adapter(directory)
    return read_object(directory / CONFIG, _REMEDY)


def _refuse_adapter(directory: Path) -> None:
    """Refuses a LoRA folder, which holds additions to a model. Some trainers write the base's config.json into it."""
    path = directory / _ADAPTER
    if not path.exists() or any(directory.glob("model*.safetensors")):
        return
    base = read_object(path, _REMEDY).get("base_model_name_or_path")
    raise QuantError(
        f"{directory} is a LoRA adapter ({_ADAPTER}), not a model",
        f"Merge it into its base model{f' ({base})' if base else ''} first: peft's merge_and_unload(), then "
        "save_pretrained() of the result and of the tokenizer; `voltserve quantize` that directory",
    )
