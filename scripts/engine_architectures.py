#!/usr/bin/env python3
"""Writes configs/engine_architectures.json: the architectures that the installed vLLM and our plugins have models for.

By kind: `generates` text (alone, or from images, video and sound, too), `pools` (embeddings, scores), `drafts` for
another model. `experts`: how an architecture's checkpoints name gate, down and up of an expert, read from the source of
its model. `removed`: architectures that vLLM once had, with the last version.

`--check` writes nothing and fails if the file is not what would be written. Imports vLLM (about ten seconds).
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "configs" / "engine_architectures.json"
# How a model names gate, down and up of its checkpoints' experts: in arguments of vLLM's mapping, or of its layer of
# experts. That layer has default names.
_NAMES = re.compile(r'ckpt_gate_proj_name="(\w+)",\s*ckpt_down_proj_name="(\w+)",\s*ckpt_up_proj_name="(\w+)"')
_OF_LAYER = re.compile(r'ckpt_names=\("(\w*)", "(\w*)", "(\w*)"\)')
_LAYER = re.compile(r"\bFusedMoEFactory\(")
_USUAL = ("gate_proj", "down_proj", "up_proj")
_TABLES = {
    "generates": ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"),
    "pools": (
        *("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS"),
        "_SEQUENCE_CLASSIFICATION_MODELS",
    ),
    "drafts": ("_SPECULATIVE_DECODING_MODELS",),
}


def expert_names(module: str) -> list[list[str]]:
    """How the model of a module below vllm.model_executor.models reads its experts; nothing where it has none."""
    spec = importlib.util.find_spec(module if "." in module else f"vllm.model_executor.models.{module}")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module}: expected a module, got none; teach scripts/engine_architectures.py about it")
    files = [Path(spec.origin)]
    if module.startswith("vllm.models."):  # a package for one family, with a folder per kind of device
        files = sorted(Path(spec.origin).parent.rglob("*.py"))
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = {*_NAMES.findall(source), *_OF_LAYER.findall(source)}
    if not found and _LAYER.search(source):
        found = {_USUAL}
    return [list(names) for names in sorted(found) if all(names)]


def render() -> str:
    """The JSON text for the vLLM that is installed."""
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    known: dict[str, tuple[str, str]] = {}  # kind and module; the first table that has a name says its kind
    for kind, tables in _TABLES.items():
        for table in tables:
            for name, (module, _) in getattr(registry, table).items():
                known.setdefault(name, (kind, module))
    backends = set(registry._TRANSFORMERS_BACKEND_MODELS)
    for name in registry.ModelRegistry.get_supported_archs() - known.keys() - backends:
        known[name] = ("generates", registry.ModelRegistry.models[name].module_name)  # ours, from the plugins
    entries = []
    for name, (kind, module) in sorted(known.items()):
        entry: dict[str, object] = {"kind": kind}
        if experts := expert_names(module):
            entry["experts"] = experts
        entries.append(f"    {json.dumps(name)}: {json.dumps(entry)}")
    version = importlib.metadata.version("vllm").partition("+")[0]
    removed = json.dumps(dict(sorted(registry._PREVIOUSLY_SUPPORTED_MODELS.items())))
    body = ",\n".join(entries)
    return f'{{\n  "vllm": "{version}",\n  "removed": {removed},\n  "architectures": {{\n{body}\n  }}\n}}\n'


def main() -> None:
    """Writes the file, or checks it."""
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{TARGET.name} is not what the installed vLLM registers: run scripts/{Path(__file__).name}")


if __name__ == "__main__":
    main()
