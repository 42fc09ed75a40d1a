"""Public models, described as a plan describes them."""

from __future__ import annotations

import functools
from typing import Any

from lookalikes.public_models import public_model
from server.plan.model import Model, describe


def model(name: str, **changes: Any) -> Model:
    """A model by its name in lookalikes/public_models.py."""
    return _changed(name, **changes) if changes else _unchanged(name)


@functools.cache
def _unchanged(name: str) -> Model:
    return _changed(name)


def _changed(name: str, **changes: Any) -> Model:
    return describe(*public_model(name, **changes), "config.json")
