"""Whether a model directory can be served here: the one answer of verify, plan, explain and serve. Torch-free.

Reads names, sizes, configs and headers, and no weight. A finding of severity error forbids serving. The most
informative one is first. quant/verify/unserved.py has the rules for models that are readable but not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quant import architectures
from quant.constants import CONFIG
from quant.errors import QuantError
from quant.formats.detect import declared, detect_config, is_ours
from quant.formats.others import ON, Device, Other, meets
from quant.formats.scheme import Scheme
from quant.model_config import read_model_config
from quant.safetensors_header import Header
from quant.verify import unserved
from quant.verify.experts import compare_experts
from quant.verify.files import Tensor, check_json_files, check_tokenizer, read_shards, tensors_of
from quant.verify.findings import Finding, error, from_exception
from quant.verify.layers import Modules, compare_siblings, compare_with_config, compare_with_scheme, sort_modules
from quant.verify.tensor_parallel import Obstacle, obstacles

# Checks whose errors forbid serving, but not reading and converting.
SERVING_ONLY = ("architecture", "tokenizer", unserved.CHECK)

_MAKE_ONE = (
    "Models are local directories; nothing is fetched while serving. `voltserve model fetch NAME DIR` and "
    "`voltserve quantize SRC DST` make one"
)


@dataclass(frozen=True)
class Target:
    """Where a model is to be served, and the flags that concern it.

    quantization: --quantization. own_code: --model-impl names other code than vLLM's models. tokenizer: --tokenizer,
    another directory. no_tokenizer: --skip-tokenizer-init. architectures: those of --hf-overrides.
    """

    device: Device
    quantization: str = ""
    own_code: bool = False
    tokenizer: Path | None = None
    no_tokenizer: bool = False
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examination:
    """The contents of a directory, apart from its weights.

    `scheme` is None for models in no format of ours. If they are quantized, `other` is their method and its row.
    """

    directory: Path
    target: Target
    config: Mapping[str, object]
    scheme: Scheme | None
    other: tuple[str, Other] | None
    headers: Mapping[str, Header]
    tensors: Mapping[str, Tensor]
    modules: Modules
    obstacles: Mapping[int, list[Obstacle]]
    findings: tuple[Finding, ...]

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """The findings that forbid serving. Empty if the directory can be served."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def refusal(self) -> str | None:
        """The same in one message."""
        if not self.refusals:
            return None
        first, *rest = self.refusals
        more = f" (and {len(rest)} more: `voltserve verify {self.directory}` lists them)" if rest else ""
        return f"{self.directory} cannot be served on {ON[self.target.device]}: {first}{more}"


def examine(directory: Path, target: Target) -> Examination:
    """Examines a model directory in whatever state. Its faults are in the findings.

    Raises QuantError if it is not a directory.
    """
    if not directory.is_dir():
        got = "a file, which is not a directory" if directory.exists() else "nothing: it does not exist"
        raise QuantError(f"model directory {directory}: expected a directory, got {got}", _MAKE_ONE)
    findings: list[Finding] = []
    config, scheme, other, is_known = _read_config(directory, target, findings)
    headers, shard_findings = read_shards(directory)
    findings += shard_findings
    tensors = tensors_of(headers)
    modules, misfits = sort_modules(tensors)
    ours = other is None and is_known
    if ours:
        findings += misfits
        findings += compare_with_scheme(scheme, modules, tensors)
        findings += unserved.check_layers(modules, config)
        findings += unserved.check_experts(config, modules)
        findings += unserved.check_scheme(scheme, tensors) if scheme else []
        findings += compare_with_config(config, modules, tensors)
        findings += compare_experts(config, modules)
        findings += compare_siblings(modules)
    if not target.no_tokenizer:
        findings += check_tokenizer(target.tokenizer or directory, config)
    findings += check_json_files(directory)
    shapes = {name: (rows, columns, kind.column_multiple) for name, (rows, columns, kind) in modules.quantized.items()}
    found = obstacles(shapes, config)
    findings += [
        error("tensor-parallel", "", one.layer, "a size that one GPU can load", str(one), "Choose another model")
        for one in found[1]
    ]
    return Examination(directory, target, config, scheme, other, headers, tensors, modules, found, tuple(findings))


def _read_config(
    directory: Path, target: Target, findings: list[Finding]
) -> tuple[Mapping[str, object], Scheme | None, tuple[str, Other] | None, bool]:
    """config.json, its quantization (ours, or another), and whether the quantization is known."""
    config: Mapping[str, object] = {}
    try:
        config = read_model_config(directory)
        _judge_architecture(config, target, findings)
        data = declared(directory, config)
        if (data is not None or target.quantization) and not (data is not None and is_ours(data)):
            met = meets(data, target.quantization or None)
            if met is None and data is not None:
                detect_config(directory, config)  # says which formats are known
            if met is not None:
                _judge_other(directory, met, target, findings)
                return config, None, met, True
        return config, detect_config(directory, config), None, True
    except QuantError as caught:
        findings.append(from_exception("format" if config else "config", caught))
    return config, None, None, False


def _judge_architecture(config: Mapping[str, object], target: Target, findings: list[Finding]) -> None:
    if target.own_code:
        return
    unknown = architectures.judge(list(target.architectures) or config.get("architectures"))
    if unknown is not None:
        where = "" if target.architectures else f"{CONFIG}: architectures"
        findings.append(error("architecture", where, "", unknown.expected, unknown.got, unknown.remedy))


def _judge_other(directory: Path, met: tuple[str, Other], target: Target, findings: list[Finding]) -> None:
    name, other = met
    where = "--quantization" if target.quantization else f"{CONFIG}: quant_method"
    expected = f"a quantization that the engine has kernels for on {ON[target.device]}"
    got = f"{name} ({other.what}): {other.why}"
    findings.append(error("format", where, "", expected, got, other.remedy))
