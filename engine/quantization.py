"""`quasarnvfp4`: which layers of a checkpoint are NVFP4.

Two kinds of checkpoint lead here: compressed-tensors' `nvfp4-pack-quantized` (described in config.json; it is routed
here with `--quantization compressed-tensors` or none, too), and a directory described by `quantize_config.json` alone.
Other compressed-tensors checkpoints stay with vLLM's own handling.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.models.utils import WeightsMapper

from engine import progress
from engine.linear import QuasarNvfp4LinearMethod
from quant.errors import QuantError
from quant.formats import compressed_tensors, quantize_config
from quant.safetensors_file import open_checkpoint

NAME = quantize_config.FORMAT


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is compressed-tensors' and all the weights it quantizes are NVFP4."""
    groups = (config.get("config_groups") or {}).values()
    formats = {config.get("format"), *(group.get("format") or config.get("format") for group in groups)}
    return config.get("quant_method") == compressed_tensors.QUANT_METHOD and formats == {compressed_tensors.FORMAT}


class QuasarNvfp4Config(QuantizationConfig):  # type: ignore[misc]  # vLLM's classes are untyped
    """What vLLM asks about a checkpoint's quantization."""

    def __init__(self, config: compressed_tensors.Config | None = None) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None) -> str | None:
        """Claims NVFP4 checkpoints, whether the user named our method, compressed-tensors or none."""
        wanted = user_quant in (None, NAME, compressed_tensors.QUANT_METHOD)
        return NAME if wanted and is_nvfp4(hf_quant_cfg) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuasarNvfp4Config":
        """Reads the `quantization_config` of config.json. Raises QuantError naming the key, expected and got."""
        read = compressed_tensors.read_config(config, "config.json: quantization_config")
        if read.w4a4:
            reason = "the checkpoint asks for 4-bit activations (W4A4), which only Blackwell computes with"
            progress.decision("activations", "16 bits or more (W4A16)", reason)
        return cls(read)

    def maybe_update_config(self, model_name: str) -> None:
        """Reads quantize_config.json in the model's directory: needed where config.json describes no quantization,
        otherwise checked against config.json where it exists.

        Raises QuantError where it is missing, malformed, or disagrees with config.json.
        """
        directory = Path(model_name)
        path = directory / quantize_config.FILE_NAME
        if self.config is None:
            block_size = quantize_config.read(directory).block_size
            self.config = compressed_tensors.Config(block_size, _unquantized_modules(directory))
        elif path.is_file() and (got := quantize_config.read(directory).block_size) != self.config.group_size:
            raise QuantError(
                f"{path}: block_size: expected {self.config.group_size} as in config.json, got {got}",
                "Restore both files from the model's source",
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Turns the checkpoint's names of ignored modules into vLLM's; patterns stay."""
        config = self._read_config()
        ignore: list[str] = []
        for name in config.ignore:
            ignore += [name] if name.startswith("re:") else hf_to_vllm_mapper.apply_list([name])
        self.config = compressed_tensors.Config(config.group_size, tuple(ignore), config.w4a4)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves embeddings, lm_head and attention to vLLM's 16-bit defaults.

        Raises:
            ValueError: of a fused layer's members (q/k/v, gate/up) some are ignored and some are not.
            NotImplementedError: quantized experts.
        """
        if not isinstance(layer, (LinearBase, FusedMoE)):
            return None
        config = self._read_config()
        ignored = should_ignore_layer(prefix, config.ignore, self.packed_modules_mapping)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if ignored else QuasarNvfp4LinearMethod(prefix, config.group_size)
        if ignored:
            return None
        raise NotImplementedError(f"{prefix}: expected linear layers, got NVFP4 experts. Serve a dense NVFP4 model")

    def _read_config(self) -> compressed_tensors.Config:
        if self.config is None:
            raise RuntimeError("maybe_update_config was not called: vLLM is not the version this was written for")
        return self.config

    def get_name(self) -> str:
        """The name for `--quantization`."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations that the linear method takes."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Volta."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `maybe_update_config` reads our file itself, with errors that name it."""
        return []


def _unquantized_modules(directory: Path) -> tuple[str, ...]:
    """Modules stored with a plain `weight`, which is all that quantize_config.json leaves unsaid."""
    names = open_checkpoint(directory).tensors
    return tuple(sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight")))
