"""Adapts a preset to a model that is smaller than its limits: a shorter context, fewer ranks. A user's own flags
stay.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from quant.constants import CONFIG
from quant.errors import QuantError
from quant.jsonfile import read_object
from quant.verify.servable import Target, examine
from quant.verify.tensor_parallel import SIZES
from server.config.flags import FlagValue
from server.config.positions import KEY, scaled_positions
from server.decisions import Decision

LENGTH, TENSOR, PIPELINE = "max-model-len", "tensor-parallel-size", "pipeline-parallel-size"
Adapted = tuple[str, FlagValue, Decision]


def adapt(model: Path, values: Mapping[str, FlagValue], sources: Mapping[str, str]) -> Iterator[Adapted]:
    """The preset's flags that the model does not allow, each with an allowed value and the reason.

    An unreadable model changes nothing: the preflight reports it.
    """
    of_preset = {
        flag: value
        for flag in (LENGTH, TENSOR, PIPELINE)
        if isinstance(value := values.get(flag), int) and sources.get(flag, "").startswith("preset ")
    }
    if not of_preset:
        return
    try:
        config = read_object(model / CONFIG, "")
        yield from _shorter(config, of_preset)
        yield from _fewer_ranks(model, of_preset)
        yield from _fewer_stages(config, of_preset)
    except QuantError:
        return


def _shorter(config: Mapping[str, object], of_preset: Mapping[str, int]) -> Iterator[Adapted]:
    positions = scaled_positions(_text(config), _number(config, KEY))
    asked = of_preset.get(LENGTH, 0)
    if positions and asked > positions:
        reason = f"the model has {positions:,} positions; the preset would allow {asked:,}"
        yield LENGTH, positions, Decision(f"--{LENGTH}", str(positions), reason)


def _fewer_ranks(model: Path, of_preset: Mapping[str, int]) -> Iterator[Adapted]:
    asked = of_preset.get(TENSOR, 1)
    if asked == 1:
        return
    obstacles = examine(model, Target("gpu", no_tokenizer=True)).obstacles
    if not obstacles.get(asked):
        return
    ranks = max((size for size in SIZES if size < asked and not obstacles[size]), default=1)
    yield TENSOR, ranks, Decision(f"--{TENSOR}", str(ranks), str(obstacles[asked][0]))


def _fewer_stages(config: Mapping[str, object], of_preset: Mapping[str, int]) -> Iterator[Adapted]:
    asked, layers = of_preset.get(PIPELINE, 1), _number(config, "num_hidden_layers")
    if layers and asked > layers:
        reason = f"the model has {layers} layer{'s' * (layers > 1)} for the preset's {asked} stages"
        yield PIPELINE, layers, Decision(f"--{PIPELINE}", str(layers), reason)


def _number(config: Mapping[str, object], key: str) -> int:
    value = _text(config).get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
