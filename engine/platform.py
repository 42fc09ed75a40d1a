"""vLLM's CUDA platform on Tesla V100s: carries out and reports what `engine.volta` decides.

vLLM imports it only if `plugin.platform` chose it, and in the middle of its own first import. So this module imports
only vllm.platforms at its top, and everything else of vLLM late.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability

from engine import gpus, progress, volta
from engine.operators import check
from engine.steps import recording

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

PROBE_LIMIT = 90.0  # seconds; importing torch and creating contexts on four GPUs takes up to 30


class VoltaPlatform(CudaPlatform):  # type: ignore[misc]  # vLLM's classes are untyped
    """`_enum` stays CUDA, so vLLM does here what it does on other NVIDIA GPUs."""

    # vLLM compiles functions beside the model, too (sampling, log probabilities). They stay eager here.
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """For `--dtype auto`. A model that refuses float16 gets float32, which `check_and_update_config` refuses."""
        return [torch.float16, torch.float32]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """7.0, also for a forced GPU, so that kernels unfit for a V100 do not run there either."""
        return DeviceCapability(*volta.CAPABILITY)

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether 7.0 is at least `capability`, as (major, minor) or as major * 10 + minor."""
        at_least: bool = cls.get_device_capability(device_id) >= _as_tuple(capability)
        return at_least

    @classmethod
    def device_id_to_physical_device_id(cls, device_id: int) -> int:
        """NVML's index of a CUDA index. vLLM's own method does not read UUIDs in CUDA_VISIBLE_DEVICES."""
        return gpus.physical_indexes()[device_id]

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum | None",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """The class of the backend that `volta.choose_attention` chooses, after vLLM has checked the layer.

        Raises:
            ValueError: it does not take the layer, or no backend takes heads of this size.
        """
        if attn_selector_config.use_mla:
            mla: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return mla
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from engine.layers import attention

        attention.register()
        reasons = attention.Backend.validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        refused = {attention.Backend.get_name(): "; ".join(reasons)} if reasons else {}
        asked = selected_backend.name if selected_backend else None
        chosen = progress.settle(volta.choose_attention(asked, attn_selector_config.head_size, refused=refused))
        backend = AttentionBackendEnum[chosen.choice]
        path: str = super().get_attn_backend_cls(backend, attn_selector_config, num_heads)
        return path

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Recorded steps, in graphs of whole decoding steps but for `--enforce-eager`; no Inductor unless asked for."""
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation, model = vllm_config.compilation_config, vllm_config.model_config
        if model is None:
            return
        progress.settle(volta.choose_graphs(enforce_eager=model.enforce_eager))
        if not model.enforce_eager and compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        if compilation.mode not in (None, CompilationMode.NONE):
            return
        compilation.mode = CompilationMode.NONE
        chosen = recording.choose(hybrid=model.is_hybrid, disabled=recording.disabled(), gpu=True)
        if progress.settle(chosen).choice == recording.RECORDED:
            recording.record(compilation, recording.FUSED_BACKEND)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Sets float16 throughout, and chooses an all-reduce that works on these GPUs.

        Raises:
            ValueError: a dtype that a V100 does not compute in, for the model or its cache.
        """
        super().check_and_update_config(vllm_config)
        check.refuse(vllm_config)
        model, cache_config, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        if model is None:
            return
        progress.settle(volta.choose_dtype(str(model.dtype).removeprefix("torch."), model.hf_config.model_type))
        from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

        directive = resolve_kv_cache_dtype_string("auto", model)
        progress.settle(volta.choose_cache_dtype(cache_config.cache_dtype, directive))
        cache_config.cache_dtype = "auto"  # the model's, which is float16
        ranks, disabled = parallel.tensor_parallel_size, parallel.disable_custom_all_reduce
        links: volta.Links = "nvlink" if cls.is_fully_connected(list(gpus.physical_indexes()[:ranks])) else "pcie"
        no_peers = os.environ.get("NCCL_P2P_DISABLE") == "1"
        try_out = ranks > 1 and not disabled and links == "nvlink" and not no_peers
        probe = try_peer_memory(ranks) if try_out else None
        chosen = volta.choose_all_reduce(ranks, disabled=disabled, links=links, no_peers=no_peers, probe=probe)
        vllm_config.additional_config[volta.ALL_REDUCE_KEY] = progress.settle(chosen).choice
        parallel.disable_custom_all_reduce = True  # vLLM's own; ours replaces it

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The import path of the communicator of a group of ranks."""
        return "engine.collective.communicator.VoltaCommunicator"


@cache
def try_peer_memory(ranks: int) -> str:
    """Writes through peer memory between the first `ranks` GPUs and reads back. Returns what failed, or "".

    It runs in a process of its own, since it may hang.
    """
    command = [sys.executable, "-m", "engine.probes.p2p", "--devices", str(ranks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_LIMIT:g} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return f"the probe exited with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    return judge_pairs(json.loads(lines[-1])["pairs"])


def judge_pairs(pairs: list[dict[str, Any]]) -> str:
    """What is wrong with the first bad pair of `engine.probes.p2p`, or ""."""
    for pair in pairs:
        between = f"GPU {pair['source']} to {pair['destination']}"
        if not pair["peer_access"]:
            return f"{between}: no peer access"
        if pair["wrong"]:
            return f"{between}: {pair['wrong']} elements arrived changed"
    return ""


def _as_tuple(capability: tuple[int, int] | int) -> tuple[int, int]:
    return capability if isinstance(capability, tuple) else divmod(capability, 10)
