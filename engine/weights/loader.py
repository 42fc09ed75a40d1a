"""vLLM's default weight loader, which also reports how many bytes of the checkpoint it has read."""

import json
import os
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from engine import gpus, patches, progress
from engine.cpu import attention as cpu_attention
from engine.steps import recording
from engine.weights.overflow import OverflowCheck
from quant.constants import INDEX_NAME
from quant.safetensors_header import is_consolidated

LOAD_FORMAT = "voltserve"


class ReportingLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM's classes are untyped
    """Load format `voltserve`: vLLM's `hf`, with phases and progress reported.

    vLLM's `auto` would prefer consolidated files to the shards that `verify` has checked.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="hf"))
        self._progress = progress.WeightsProgress()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Builds and loads the model. vLLM then sizes the KV cache and warms up."""
        progress.phase("weights")
        patches.apply(forced=gpus.forced(os.environ), in_worker=True)
        if model_config.is_hybrid:
            # Not earlier: on a GPU this import initializes CUDA, and vLLM would not fork this process.
            from engine.layers import gdn

            gdn.register()
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            recording.call_attention_directly(model)
        elif vllm_config.compilation_config.backend in recording.BACKENDS:
            recording.allow_eager(model)
        if current_platform.device_type == "cpu":
            from engine.cpu import decoder as cpu_decoder

            cpu_attention.spare_openmp(model)
            cpu_decoder.fuse(model, vllm_config)
        reason = "all parameters and buffers of this rank, once loaded"
        progress.decision("weights in memory", f"{bytes_held(model, self._loaded)} bytes", reason)
        if current_platform.is_cuda():
            peak = torch.cuda.max_memory_allocated()
            progress.decision("memory while loading", f"{peak} bytes", "the most that was allocated on this rank's GPU")
        progress.phase("warmup")
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Loads the weights. Packing by quantized layers, which follows, is still phase `weights`.

        Raises:
            QuantError: a tensor is not finite, or not finite in the engine's float16.
        """
        self._overflow = OverflowCheck(model_config.dtype)
        super().load_weights(model, model_config)
        self._overflow.judge(model)
        self._loaded = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        self._progress.finish()

    def _prepare_weights(self, *args: Any) -> tuple[str, list[str], bool]:
        """As in vLLM, but without consolidated files if there are shards: vLLM would load each weight twice."""
        folder, files, safetensors = super()._prepare_weights(*args)
        own = [file for file in files if not is_consolidated(Path(file).name)]
        return folder, own or files, safetensors

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        folder, files, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        self._progress.expect(sum(Path(file).stat().st_size for file in files))
        shards = shard_names(Path(folder))
        only_file = Path(files[0]).name if len(files) == 1 else ""
        for name, tensor in super()._get_weights_iterator(source):
            file = shards.get(name.removeprefix(source.prefix), only_file)
            self._overflow.look_at(name, tensor, file)
            yield name, tensor
            # By now vLLM has copied the bytes out of the mapped file.
            self._progress.advance(tensor.nbytes, file)


def bytes_held(model: nn.Module, loaded: Mapping[str, int]) -> int:
    """Bytes of all parameters and buffers. Shared memory (tied embeddings) counts once.

    Args:
        model: as the engine will run it.
        loaded: bytes of its parameters when they were loaded. vLLM packs some parameters for oneDNN and leaves them
            empty (vllm/model_executor/layers/utils.py). oneDNN then holds as many bytes, where torch does not see them.
    """
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    packed = [name for name, parameter in model.named_parameters() if parameter.numel() == 0]
    return sum(held.values()) + sum(loaded.get(name, 0) for name in packed)


def shard_names(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index in `folder`; empty without an index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return {}
    weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return weight_map
