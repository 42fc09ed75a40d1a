"""How many positions a model's config.json allows, as vLLM derives it from the rotary embedding's scaling."""

from collections.abc import Iterator, Mapping

KEY = "max_position_embeddings"
# Kinds of scaling whose `max_position_embeddings` counts the scaled positions already.
_SCALED_ALREADY = ("su", "longrope", "llama3")


def scaled_positions(text: Mapping[str, object], positions: int) -> int:
    """The positions with scaling. `text`: the text model's config.json; `positions`: its max_position_embeddings.

    YaRN stretches the positions that the model was first trained on; other kinds stretch `positions`.
    """
    base, factor = positions, 1.0
    if "gemma3" not in str(text.get("model_type", "")):
        for rope in _ropes(text):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            if kind in _SCALED_ALREADY:
                continue
            factor = _number(rope, "factor") or factor
            if kind == "yarn":
                base = int(_number(rope, "original_max_position_embeddings") or positions)
    return int(base * factor)


def _ropes(text: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The parameters of rotary embeddings: one set, or one for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    yield from nested or [rope]


def _number(rope: Mapping[str, object], key: str) -> float | None:
    value = rope.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
