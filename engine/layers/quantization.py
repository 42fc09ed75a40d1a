"""`quasarnvfp4`: the quantization that vLLM uses for all NVFP4 and FP8 checkpoints. It decides which layers are which.

It takes every format in quant/formats/registry.py, under any of their names in `--quantization`, or none. It also takes
a directory with `quantize_config.json` alone. vLLM handles other checkpoints itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from engine import progress
from engine.layers.embedding import StoredDtypeEmbedding
from engine.layers.fp8 import Fp8LinearMethod
from engine.layers.linear import QuasarNvfp4LinearMethod
from engine.layers.moe import QuasarNvfp4MoEMethod
from quant.constants import CONFIG
from quant.errors import QuantError
from quant.formats import compressed_tensors, modelopt, quantize_config, registry
from quant.formats.detect import is_ours, quantization_config, read_scheme
from quant.formats.scheme import Scheme
from quant.formats.weights import WeightKind
from quant.jsonfile import read_object
from quant.verify.files import read_shards, tensors_of
from quant.verify.layers import Modules, sort_modules

NAME = quantize_config.NAME
# Gate, down and up of an expert, as checkpoints name them.
EXPERT_LEAVES = (("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"))


class QuasarNvfp4Config(QuantizationConfig):  # type: ignore[misc]  # vLLM's classes are untyped
    """Answers vLLM's questions about a checkpoint's quantization."""

    def __init__(self, config: Scheme | None = None) -> None:
        super().__init__()
        self.config = config
        # By the checkpoint's names, then by vLLM's: FP8 linears, and heads in NVFP4.
        self._fp8: dict[str, WeightKind] = {}
        self._heads: set[str] = set()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claims NVFP4 and FP8 checkpoints, whether the user named our method, their format's or none."""
        return NAME if user_quant in (None, *registry.engine_names()) and is_ours(hf_quant_cfg) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuasarNvfp4Config":
        """Reads config.json's `quantization_config`. If only hf_quant_config.json exists, vLLM passes its contents.

        Raises QuantError naming the key, expected and got.
        """
        read = read_scheme(config, "config.json: quantization_config")
        if read.w4a4:
            reason = "the checkpoint asks for 4-bit activations (W4A4), which only Blackwell computes with"
            progress.decision("activations", "16 bits or more (W4A16)", reason)
        if read.w8a8:
            reason = (
                "the checkpoint asks for 8-bit activations (W8A8); its input scales are dropped, at least as accurate"
            )
            progress.decision("activations of FP8 layers", "16 bits or more (W8A16)", reason)
        return cls(read)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Completes the config from the model's directory.

        quantize_config.json is needed if config.json describes no quantization; otherwise the two must agree. If the
        format's `ignore` is exact (compressed-tensors), the config decides which layers are quantized. Otherwise the
        tensors decide: ModelOpt and AutoRound match names loosely or not at all. The tensors always decide which of
        them are FP8.

        Raises QuantError if that file is missing, malformed or disagrees with config.json, and for weights that are
        neither NVFP4, FP8 nor 16-bit.
        """
        directory = Path(model_name)
        path = directory / quantize_config.FILE_NAME
        if self.config is None:
            block_size = quantize_config.read(directory).block_size
            ignore = tuple(sorted(_modules(directory).plain))
            self.config = compressed_tensors.scheme(block_size, ignore, str(path))
        elif path.is_file() and (got := quantize_config.read(directory).block_size) != self.config.group_size:
            raise QuantError(
                f"{path}: block_size: expected {self.config.group_size} as in config.json, got {got}",
                "Restore both files from the model's source",
            )
        if directory.is_dir():
            self._heads = _heads(directory)
        if not registry.ignore_is_exact(self.config) and directory.is_dir():
            modules = _modules(directory)
            # Where the tensors decide, patterns that they contradict do not count.
            said = () if self.config.by_tensors else self.config.ignore or ()
            self.config = replace(self.config, ignore=(*said, *sorted(modules.plain)))
            self._fp8 = {module: kind for module, (_, _, kind) in modules.fp8.items()}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Translates the checkpoint's names of ignored modules into vLLM's. Patterns stay as they are."""
        config = self._read_config()
        ignore: list[str] = []
        for name in config.ignore or ():
            ignore += [name] if name.startswith("re:") else hf_to_vllm_mapper.apply_list([name])
        self.config = replace(config, ignore=tuple(ignore))
        self._fp8 = {
            mapped: kind for name, kind in self._fp8.items() for mapped in hf_to_vllm_mapper.apply_list([name])
        }
        self._heads = set(hf_to_vllm_mapper.apply_list(sorted(self._heads)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer. None means vLLM's default (embeddings on a GPU, attention).

        Raises:
            ValueError: only some members of a fused layer (q/k/v, gate/up, experts) are ignored.
        """
        if isinstance(layer, VocabParallelEmbedding):
            return self._vocabulary_method(layer, prefix)
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            return None
        config = self._read_config()
        ignore = config.ignore or ()
        if isinstance(layer, RoutedExperts):
            ignored = ignores_experts(ignore, prefix, layer.global_num_experts)
            return None if ignored else QuasarNvfp4MoEMethod(prefix, config, layer.moe_config)
        if (kind := self._fp8_kind(prefix)) is not None:
            return Fp8LinearMethod(prefix, kind)
        ignored = should_ignore_layer(prefix, ignore, self.packed_modules_mapping)
        return UnquantizedLinearMethod() if ignored else QuasarNvfp4LinearMethod(prefix, config)

    def _vocabulary_method(self, layer: VocabParallelEmbedding, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead) and prefix in self._fp8:
            return Fp8LinearMethod(prefix, self._fp8[prefix])
        if isinstance(layer, ParallelLMHead) and prefix in self._heads:
            return QuasarNvfp4LinearMethod(prefix, self._read_config())
        return StoredDtypeEmbedding() if StoredDtypeEmbedding.suits(layer) else None

    def _fp8_kind(self, prefix: str) -> WeightKind | None:
        """The kind of an FP8 layer. None if it is no such layer.

        Raises ValueError if only some members of a fused layer are FP8, or they need different kernels.
        """
        if prefix in self._fp8:
            return self._fp8[prefix]
        parent, dot, leaf = prefix.rpartition(".")
        names = [parent + dot + member for member in self.packed_modules_mapping.get(leaf, ())]
        kinds = [self._fp8.get(name) for name in names]
        if not any(kinds):
            return None
        if None in kinds or len({kind.columns for kind in kinds if kind is not None}) > 1:
            got = ", ".join(f"{name}: {kind or 'not FP8'}" for name, kind in zip(names, kinds, strict=True))
            raise ValueError(f"{prefix}: expected one kind of weights in the members of a fused layer, got {got}")
        return kinds[0]

    def _read_config(self) -> Scheme:
        if self.config is None:
            raise RuntimeError("maybe_update_config was not called: vLLM is not the version this was written for")
        return self.config

    def get_name(self) -> str:
        """The name for `--quantization`."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes of activations that the linear method takes."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Volta."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `maybe_update_config` reads our file itself, with errors that name it."""
        return []


def ignores_experts(ignore: Collection[str], prefix: str, experts: int) -> bool:
    """Whether `ignore` leaves layer `prefix` with its `experts` experts in 16 bits: by its name, or by all of theirs.

    Raises ValueError if it names only some experts, since engines fuse them into one layer.
    """
    if should_ignore_layer(prefix, ignore):
        return True
    about_us = [entry for entry in ignore if entry.startswith(("re:", f"{prefix}."))]
    # A layer does not know how its checkpoint names the projections. Names of the other kind are in no list.
    for leaves in EXPERT_LEAVES:
        names = [f"{prefix}.{expert}.{leaf}" for expert in range(experts) for leaf in leaves]
        kept = [name for name in names if should_ignore_layer(name, about_us)]
        if len(kept) == len(names):
            return True
        if kept:
            raise ValueError(
                f"{prefix}: expected all experts in NVFP4 or all in 16 bits, got {len(kept)} of {len(names)} "
                f"projections ignored, {kept[0]} among them"
            )
    return False


def modelopt_config(directory: Path) -> dict[str, Any] | None:
    """A `quantization_config` for a model whose config.json has none, while hf_quant_config.json says NVFP4.

    vLLM reads that file itself, but stops at every algorithm except FP8 and NVFP4. Raises QuantError if a file is not a
    JSON object.
    """
    path, config = directory / modelopt.FILE_NAME, directory / CONFIG
    if not path.is_file() or not config.is_file():
        return None
    remedy = "Restore the file from the model's source"
    data = read_object(path, remedy)
    if quantization_config(read_object(config, remedy), config) is not None or not is_ours(data):
        return None
    # Without `producer`, which would make vLLM judge the algorithm.
    return {"quantization": data.get("quantization", data), "quant_method": modelopt.NAME}


def _heads(directory: Path) -> set[str]:
    """The heads in NVFP4. No list names a head that is tied to the embedding, so the tensors decide."""
    modules, _ = sort_modules(tensors_of(read_shards(directory)[0]))
    return {module for module in modules.nvfp4 if module.rpartition(".")[2] == "lm_head"}


def _modules(directory: Path) -> Modules:
    """The modules by their tensors' kinds. Raises QuantError for weights that are neither 16-bit, FP8 nor NVFP4."""
    headers, findings = read_shards(directory)
    if problems := [finding for finding in findings if finding.severity == "error"]:
        raise QuantError(f"{directory}: {problems[0]}", "See `voltserve verify`")
    modules, misfits = sort_modules(tensors_of(headers))
    if misfits:
        raise QuantError(f"{directory}: {misfits[0]}", "See `voltserve verify`")
    for module, kind in modules.foreign.items():
        raise QuantError(
            f"{directory}: {module}: expected NVFP4, FP8 or 16-bit weights, got {kind}",
            "Choose a model whose layers are all one or the other",
        )
    return modules
