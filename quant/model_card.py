"""The model card of a quantized model: README.md with the hub's front matter. It states known facts only.

The source's card describes other weights, so it is not copied. Its licence and languages apply to the result too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from quant.formats.quantize_config import FILE_NAME, QuantizeConfig

NAME = "README.md"
# Keys of the source's front matter that apply to the result too.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
# A folder of the hub's cache is models--OWNER--NAME/snapshots/REVISION.
_CACHED = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True)
class Figures:
    """Numbers of quantized linears and of kept tensors, and bytes before and after."""

    quantized: int
    kept: int
    source_bytes: int
    output_bytes: int


def model_name(directory: Path) -> str:
    """The model's name, from its folder or from the hub's cache. Never a path, which is private."""
    resolved = directory.resolve()
    for folder in (resolved, *resolved.parents):
        if match := _CACHED.fullmatch(folder.name):
            return f"{match[1]}/{match[2]}"
    return resolved.name


def readmes(directory: Path) -> tuple[str, ...]:
    """The names of the cards in `directory`."""
    return tuple(path.name for path in directory.iterdir() if path.name.lower() in {"readme.md", "readme.txt"})


def write(source: Path, out: Path, record: QuantizeConfig, figures: Figures, text: str) -> None:
    """Writes `out`/README.md. `text` names the calibration text; empty without calibration."""
    given = front_matter(source)
    head = {
        **{key: given[key] for key in _INHERITED if key in given},
        "base_model": record.source,
        "base_model_relation": "quantized",
        "tags": ["nvfp4", "compressed-tensors", "voltserve"],
    }
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    name = record.source or "model"
    calibration = "None: the method runs no model."
    if text:
        calibration = (
            f"{record.calibration_windows} windows of {record.calibration_window_tokens} tokens, drawn with seed "
            f"{record.calibration_seed} from {_public(text)} (SHA-256 of the text: `{record.calibration_sha256}`). "
            "Measure on other texts."
        )
    body = f"""# {name} in NVFP4

4-bit weights made from {name} by `voltserve quantize`, version {record.voltserve_version}.
`{FILE_NAME}` holds the same for programs.

| | |
|---|---|
| method | {record.scale_policy}, {record.block_size} weights per block scale |
| linear layers in NVFP4 | {figures.quantized} |
| tensors kept in 16 bits | {figures.kept} |
| size | {figures.output_bytes / 1e6:.0f} MB, from {figures.source_bytes / 1e6:.0f} MB |
| calibration | {calibration} |
| quality | not measured: `voltserve eval DIR --source SOURCE` does |

## Serving

```
voltserve verify DIR
voltserve serve --model DIR
```

DIR is this folder. On Tesla V100s activations stay in float16 (W4A16). Other engines that read
compressed-tensors' `nvfp4-pack-quantized` load it, too.

## Licence

{licence(source, given)}
"""
    (out / NAME).write_text(f"---\n{front}---\n\n{body}", encoding="utf-8")


def front_matter(directory: Path) -> Mapping[str, object]:
    """The YAML at the head of the source's card. Empty if there is none, or if it is malformed."""
    for name in readmes(directory):
        match = _FRONT_MATTER.match((directory / name).read_text(encoding="utf-8", errors="replace"))
        if match is None:
            continue
        try:
            found = yaml.safe_load(match[1])
        except yaml.YAMLError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def licence(directory: Path, given: Mapping[str, object]) -> str:
    """The known facts about the source's licence, in a sentence or two."""
    files = sorted(path.name for path in directory.glob("LICENSE*") if path.is_file())
    beside = f" Its text is in {', '.join(f'`{name}`' for name in files)}." if files else ""
    if "license" in given:
        named = str(given.get("license_name") or given["license"])
        link = f" ({given['license_link']})" if given.get("license_link") else ""
        return f"The source's, by its model card: {named}{link}.{beside}"
    if files:
        first = next((line.strip() for line in _lines(directory / files[0]) if line.strip()), "")
        return f'The source\'s; its licence file begins: "{first}".{beside}'
    return (
        "Unknown: the source has no model card with a licence and no LICENSE file. Ask its owner before passing it on."
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _public(source: str) -> str:
    """A file's name, without its folder."""
    return Path(source).name if "/" in source and " " not in source else source
