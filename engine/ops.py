"""Operations that several parts of the engine call at run time, and the devices that have kernels for them.

Recorded steps call these functions: `steps/recording.py` and the patterns of `steps/fusion.py` put them into graphs.
The collective calls `add_rms_norm` too. Nothing here imports another module of the engine. torch and vLLM are imported
when an operation first runs: `engine.explain` decides without them.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def kernel_devices() -> list[str]:
    """The devices that voltserve_kernels has code for. Importing the package registers torch.ops.voltserve."""
    if importlib.util.find_spec("voltserve_kernels") is None:
        return []
    import voltserve_kernels

    devices: list[str] = voltserve_kernels.devices()
    return devices


def update_and_attend(
    query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", output: "torch.Tensor", layer_name: str
) -> None:
    """vLLM's `unified_kv_cache_update` and then `unified_attention_with_output` of one layer."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata, layer, cache, slots = get_attention_context(layer_name)
    if slots is not None:
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
    layer.impl.forward(layer, query, key, value, cache, metadata, output=output)


def rotate_and_attend(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    output: "torch.Tensor",
    layer_name: str,
    positions: "torch.Tensor",
    cos_sin: "torch.Tensor",
    halves: bool,
    q_weight: "torch.Tensor | None",
    k_weight: "torch.Tensor | None",
    eps: float,
) -> None:
    """Norms, rotation and cache update of query and key in one kernel, then the layer's attention.

    Args:
        query: [T, H, D], as the qkv projection left it; rotated in place.
        key: [T, H_kv, D], as the qkv projection left it.
        value: [T, H_kv, D].
        output: [T, H, D], where attention writes its result.
        layer_name: vLLM's name of the layer.
        positions: int64 [T].
        cos_sin: float16 [positions, rotated dimensions], vLLM's table of angles.
        halves: the dimensions of a pair lie half a head apart; otherwise they are neighbours.
        q_weight: [D], the weight of the query's norm; None without a norm.
        k_weight: [D], the weight of the key's norm; None without a norm.
        eps: added to the mean of squares.
    """
    import torch
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata, layer, cache, slots = get_attention_context(layer_name)
    if metadata is not None:  # None: vLLM measures the memory of a step that has no requests
        keys, values = layer.impl.halves(cache)
        torch.ops.voltserve.rotate_and_cache(
            query, key, value, positions, cos_sin, halves, q_weight, k_weight, eps, keys, values, slots
        )
    layer.impl.forward(layer, query, key, value, cache, metadata, output=output)


def add_rms_norm(
    x: "torch.Tensor",
    residual: "torch.Tensor | None",
    weight: "torch.Tensor",
    eps: float,
) -> "torch.Tensor":
    """The RMS norm of x + residual, float16 [M, hidden]. The sum is written to `residual`."""
    import torch

    op = torch.ops.voltserve.all_reduce_rms_norm
    y: torch.Tensor = op(x, residual, weight, eps, [], [], None, 0, 0.0)
    return y


def all_reduce_add_rms_norm(
    x: "torch.Tensor",
    residual: "torch.Tensor",
    weight: "torch.Tensor",
    eps: float,
    group_name: str,
) -> "torch.Tensor":
    """`add_rms_norm` of the sum of all ranks' x; `group_name` is vLLM's name of their group."""
    from vllm.distributed.parallel_state import _groups

    communicator: Any = _groups[group_name]().device_communicator
    y: torch.Tensor = communicator.all_reduce_rms_norm(x, residual, weight, eps)
    return y
