"""Makes docs/schemas/*.json, the JSON Schemas of the YAML files that users write: `python -m server.schemas`.

Editors complete and check keys with them. Each is made from the pydantic model that reads the file. The flags' names,
which the models do not have, come from vLLM's flags and serve's settings.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from server.cluster.file import ClusterFile
from server.config.engines_file import OF_AN_ENGINE, OF_ON_DEMAND, EnginesFile
from server.config.flags import REFUSED, RETIRED, engine_flags
from server.config.presets import Preset
from server.config.settings import all_flags, setting_flags

FOLDER = Path(__file__).parents[1] / "docs/schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def model_flags() -> list[str]:
    """The flags that a model in an engines.yaml or cluster.yaml may have."""
    return sorted(all_flags().keys() - (setting_flags().keys() - OF_AN_ENGINE) - REFUSED.keys() - RETIRED.keys())


def preset_flags() -> list[str]:
    """The flags that a preset may have."""
    return sorted(engine_flags().keys() - REFUSED.keys())


def engines_schema() -> Schema:
    """Of files for `serve --engines`."""
    made = EnginesFile.model_json_schema(by_alias=True)
    model = made["$defs"]["Model"]
    _name_model_flags(model)
    times = ["idle_timeout", "min_residence", "drain_timeout"]
    on_demand = {"required": ["on_demand"], "properties": {"on_demand": {"const": True}}}
    one_replica = {"properties": {"replicas": {"maxItems": 1}}}
    pinned_has_no_times = {"properties": {"pinned": {"const": False}}}
    model["allOf"] = [
        {"if": _has_one_of(OF_ON_DEMAND), "then": on_demand},
        {"if": on_demand, "then": one_replica},
        {"if": _has_one_of(times), "then": pinned_has_no_times},
    ]
    return {"$schema": DRAFT, **made}


def _has_one_of(names: Iterable[str]) -> Schema:
    return {"anyOf": [{"required": [name]} for name in names]}


def cluster_schema() -> Schema:
    """Of files for `deploy --config`."""
    made = ClusterFile.model_json_schema(by_alias=True)
    model = made["$defs"]["Model"]
    _name_model_flags(model)
    model["not"] = {"required": ["replicas", "autoscaling"]}
    return {"$schema": DRAFT, **made}


def presets_schema() -> Schema:
    """Of the files in configs/presets, and of files for `--preset FILE.yaml`."""
    made = Preset.model_json_schema(by_alias=True)
    for part in (made, made["$defs"]["Variant"]):
        for key in ("engine", "limits"):
            _name_flags(part["properties"][key], preset_flags())
    made["properties"]["variants"]["additionalProperties"] = False  # names of another form
    made["required"].remove("match")
    made["anyOf"] = [{"required": ["match"]}, {"required": ["extends"]}]  # an extended preset brings its own
    return {"$schema": DRAFT, **made}


def _name_model_flags(model: Schema) -> None:
    flags = model["properties"]["flags"]
    _name_flags(flags, model_flags())
    flags["required"] = ["model"]


def _name_flags(part: Schema, names: Iterable[str]) -> None:
    part["propertyNames"] = {"enum": list(names)}


SCHEMAS: Mapping[str, Callable[[], Schema]] = MappingProxyType(
    {"engines": engines_schema, "cluster": cluster_schema, "presets": presets_schema}
)


def path_of(name: str) -> Path:
    """Where a schema's file is."""
    return FOLDER / f"{name}.json"


def render(name: str) -> str:
    """The text of a schema's file."""
    return json.dumps(SCHEMAS[name](), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        path_of(name).write_text(render(name), encoding="utf-8")
