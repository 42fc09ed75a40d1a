"""Makes docs/schemas/engines.json, the JSON Schema of `--engines` files: editors complete and check keys with it."""

import json
from pathlib import Path
from typing import Any

from server.config.engines_file import OF_AN_ENGINE, EnginesFile
from server.config.flags import REFUSED, RETIRED
from server.config.settings import all_flags, setting_flags

SCHEMA = Path(__file__).parents[2] / "docs/schemas/engines.json"


def flag_names() -> list[str]:
    """The flags that a model may have."""
    return sorted(all_flags().keys() - (setting_flags().keys() - OF_AN_ENGINE) - REFUSED.keys() - RETIRED.keys())


def schema() -> dict[str, Any]:
    """The schema, with the names of flags, which the model has not."""
    made = EnginesFile.model_json_schema(by_alias=True)
    flags = made["$defs"]["Model"]["properties"]["flags"]
    flags["propertyNames"] = {"enum": flag_names()}
    flags["required"] = ["model"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def render() -> str:
    """The file's text."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.parent.mkdir(exist_ok=True)
    SCHEMA.write_text(render(), encoding="utf-8")
