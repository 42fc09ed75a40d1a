"""The engine's decisions on V100s, for `voltserve explain`. The engine's own code makes them, in a separate process."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.errors import QuantError
from quant.jsonfile import read_object
from server.config.devices import V100
from server.config.presets import Match, find_preset, load_presets
from server.config.render import OFF_VARIABLE, render_launch
from server.config.settings import Config
from server.decisions import Decision
from server.plan.model import Model, NotPlannedError, read_model

EXPLAIN = ("-m", "engine.explain")
LIMIT = 60.0  # seconds; torch's import takes a few


def engine_decisions(config: Config) -> tuple[tuple[Decision, ...], str | None]:
    """The engine's decisions for a preset of V100s, and the problem that would stop it. Nothing for other presets.

    Unreadable model files are no error here: the preflight reports them.
    """
    match = find_preset(config.preset, load_presets()).match
    if match is None or match.capability != V100:
        return (), None
    directory = Path(config.model)
    try:
        model = read_model(directory)
        declared = read_object(directory / "config.json", "")
    except (QuantError, NotPlannedError, OSError) as error:
        return (Decision("the engine's choices", "not known", str(error)),), None
    if not model.linears:
        return (Decision("the engine's choices", "not known", f"{directory}: no NVFP4 layer was found"),), None
    asked = question(config, match, model, declared)
    try:
        done = subprocess.run(
            [sys.executable, *EXPLAIN],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)]
        return (Decision("the engine's choices", "not known", f"engine.explain: {lines[-1]}"),), None
    choices = json.loads(done.stdout)
    problem = next((choice["problem"] for choice in choices if choice["problem"]), None)
    decisions = (
        Decision(choice["what"], choice["choice"], choice["reason"]) for choice in choices if not choice["problem"]
    )
    return tuple(decisions), problem


def question(config: Config, match: Match, model: Model, declared: Mapping[str, Any]) -> dict[str, Any]:
    """What `engine.explain` reads, from the configuration and the model's config.json."""
    flags = config.engine
    text = declared.get("text_config") or declared
    ranks = int(str(flags.get("tensor-parallel-size", 1)))
    largest = max(model.linears, key=lambda linear: linear.rows * linear.columns)
    asked = str(flags.get("dtype", "auto"))
    wish = _cache_wish(declared.get("quantization_config") or {})
    cache = str(flags.get("kv-cache-dtype", "auto"))
    return {
        "dtype": {"auto": "float16", "half": "float16"}.get(asked, asked),
        "model_type": str(text.get("model_type", "")),
        "kv_cache_dtype": wish if cache == "auto" else cache,
        "kv_directive": wish,
        "attention_backend": flags.get("attention-backend"),
        "head_size": model.head_dim,
        "ranks": ranks,
        "nvlink": bool(match.nvlink),
        "no_peers": config.env.get("NCCL_P2P_DISABLE") == "1",
        "disable_custom_all_reduce": bool(flags.get("disable-custom-all-reduce", False)),
        "enforce_eager": bool(flags.get("enforce-eager", False)),
        "hybrid": model.linear_attention is not None,
        "recording_disabled": render_launch(config, Path()).env.get(OFF_VARIABLE) == "1",
        # The largest layer; gate and up, which it usually is one of, are split by rows.
        "matrix": [max(1, largest.rows // ranks), largest.columns, largest.kind.columns],
    }


def _cache_wish(quantization: Mapping[str, Any]) -> str:
    inner = quantization.get("quantization") or quantization
    asks = quantization.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    # Of NVFP4 vLLM's release makes its default (vllm/utils/torch_utils.py).
    return "fp8" if asks and str(asks).upper() != "NVFP4" else "auto"
