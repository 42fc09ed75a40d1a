"""The method of NVFP4 experts: vLLM's RoutedExperts, each expert an NVFP4 gate, up and down projection.

Routers stay in 16 bits. H is the model's width, and I this rank's part of an expert's width. Each expert's gate and up
(w1, w3) form one matrix `w13` [2 I, H]. Its down (w2) is [H, I]. Factors are per row, so gate and up may have different
global scales.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from engine import progress
from engine.layers.experts import CpuExperts, routed
from engine.layers.linear import choose_route
from engine.layers.moe_slots import Slots, align, block_size
from engine.ops import kernel_devices
from quant import e4m3
from quant.errors import QuantError
from quant.formats.linear import read_linear
from quant.formats.modelopt import PRE_QUANT_SCALE
from quant.formats.scheme import Scheme
from quant.tensor import NVFP4Tensor

_REMEDY = "Check the model's files with `voltserve verify` and fetch what is damaged again"

Projection = Literal["w1", "w2", "w3"]  # gate, down, up
MATRICES: dict[str, tuple[Projection, ...]] = {"w13": ("w1", "w3"), "w2": ("w2",)}


class QuasarNvfp4MoEMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM's classes are untyped
    """y = Σ over a token's experts e of weight[e] * down_e(silu(gate_e(x)) * up_e(x)), for one tensor-parallel rank."""

    def __init__(self, prefix: str, scheme: Scheme, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.group_size = scheme.group_size
        self._layout = scheme.layout
        self._loaded: set[tuple[str, Projection, int]] = set()
        self.route = choose_route(kernel_devices(), current_platform.device_type, moe.in_dtype)
        dense = CpuExperts if current_platform.device_type == "cpu" else UnquantizedFusedMoEMethod
        self._dense = dense(moe) if self.route.name == "dense" else None
        self._activate = SiluAndMul()

    @property
    def is_monolithic(self) -> bool:
        """Whether `apply_monolithic` routes the tokens. It does on a CPU, where vLLM's router has no kernels."""
        return bool(current_platform.device_type == "cpu")

    def get_fused_moe_quant_config(self, layer: Module) -> FusedMoEQuantConfig | None:
        """None: the config would describe weights to vLLM's kernels, which do not compute these."""
        return None

    def create_weights(
        self,
        layer: Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes this rank's parameters, each [E, N, …]; the global scale has one element per row.

        vLLM's mapping of experts sets their names: `w13_` or `w2_`, then the name of the checkpoint's format.

        Raises:
            QuantError: K of a matrix is not a multiple of the group size on this rank.
            NotImplementedError: this kind of experts, or this way to distribute them, is not supported.
        """
        self._refuse_unknown_kinds(layer)
        self._dtype = params_dtype
        hidden, own = hidden_size, intermediate_size_per_partition
        self._members: dict[Projection, tuple[int, int]] = {
            "w1": (own, hidden),
            "w3": (own, hidden),
            "w2": (hidden, own),
        }
        for columns, split in ((hidden, 1), (own, self.moe.tp_size)):
            if columns % self.group_size:
                raise QuantError(self._misfit(columns, columns * split), "Choose another --tensor-parallel-size")
        for name, rows, columns in (("w13", 2 * own, hidden), ("w2", hidden, own)):
            unloaded = torch.full((num_experts, rows, columns // self.group_size), e4m3.NAN, dtype=torch.uint8)
            for suffix, data in (
                (self._layout.codes, torch.empty(num_experts, rows, columns // 2, dtype=torch.uint8)),
                (self._layout.scales, unloaded.view(torch.float8_e4m3fn)),  # NaN: unloaded scales are found
                (self._layout.global_scale, torch.full((num_experts, rows), torch.nan, dtype=torch.float32)),
            ):
                parameter = Parameter(data, requires_grad=False)
                parameter.weight_loader = self._loader(suffix)  # type: ignore[attr-defined]
                layer.register_parameter(f"{name}_{suffix}", parameter)
            for suffix, load in ((self._layout.input_scale, _drop), (PRE_QUANT_SCALE, self._refuse_pre_quant_scale)):
                parameter = Parameter(torch.empty(0), requires_grad=False)
                parameter.weight_loader = load  # type: ignore[attr-defined]
                layer.register_parameter(f"{name}_{suffix}", parameter)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Turns the parameters into the form that the route computes with.

        Raises:
            QuantError: a tensor is missing, a scale is NaN, or a global scale is not a positive number.
        """
        progress.decision("NVFP4 experts", self.route.name, self.route.reason)
        for name, projections in MATRICES.items():
            codes, scales, globals_ = (
                getattr(layer, f"{name}_{suffix}").data
                for suffix in (self._layout.codes, self._layout.scales, self._layout.global_scale)
            )
            for suffix in (*self._suffixes, self._layout.input_scale, PRE_QUANT_SCALE):
                delattr(layer, f"{name}_{suffix}")
            factors = torch.stack(
                [
                    self._row_factor(expert, projections, codes[expert], scales[expert], globals_[expert])
                    for expert in range(len(codes))
                ]
            )
            if self._dense is not None:
                weight = codes.new_empty((*codes.shape[:2], 2 * codes.shape[2]), dtype=self._dtype)
                for out, *parts in zip(weight, codes, scales, factors, strict=True):
                    expert = NVFP4Tensor(parts[0], parts[1], parts[2], self.group_size)
                    out.copy_(expert.dequantize(self._dtype))
                layer.register_parameter(f"{name}_weight", Parameter(weight, requires_grad=False))
            else:
                packed, packed_scales = pack_experts(codes, scales, self.group_size)
                for part, tensor in (("packed", packed), ("scales", packed_scales), ("row_factor", factors)):
                    layer.register_parameter(f"{name}_{part}", Parameter(tensor, requires_grad=False))
        if self._dense is not None:
            self._dense.process_weights_after_loading(layer)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, H] to [M, H]; topk_weights float [M, k], topk_ids int [M, k]. vLLM adds shared experts."""
        if self._dense is not None:
            dense: torch.Tensor = self._dense.apply(
                layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
            return dense
        tokens, top_k = topk_ids.shape
        experts: int = layer.w13_row_factor.shape[0]
        order = align(topk_ids, experts, block_size(tokens * top_k, experts))
        gate_up = self._gemm(layer, "w13", x.contiguous(), order, top_k)
        down = self._gemm(layer, "w2", self._activate(gate_up), order, 1)
        return torch.bmm(topk_weights.to(down.dtype).unsqueeze(1), down.view(tokens, top_k, down.shape[1])).squeeze(1)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [M, H] and router_logits [M, E] to [M, H], on a CPU."""
        if self._dense is not None:
            dense: torch.Tensor = self._dense.apply_monolithic(layer, x, router_logits, input_ids)
            return dense
        weights, ids = routed(layer, x, router_logits)
        return self.apply(layer, x, weights, ids)

    @property
    def _suffixes(self) -> tuple[str, str, str]:
        return self._layout.codes, self._layout.scales, self._layout.global_scale

    def _gemm(self, layer: Module, name: str, x: torch.Tensor, order: Slots, top_k: int) -> torch.Tensor:
        parts = (getattr(layer, f"{name}_{part}") for part in ("packed", "scales", "row_factor"))
        y: torch.Tensor = torch.ops.voltserve.nvfp4_moe_linear(x, *parts, self.group_size, *order, top_k)
        return y

    def _loader(self, suffix: str) -> Callable[..., bool]:
        """Loads one tensor of one expert's projection: this rank's rows of gate and up, or its columns of down.

        vLLM's loader would accept a tensor of another shape, and copy as much of it as fits.
        """
        packing = {self._layout.codes: 2, self._layout.scales: self.group_size}  # columns per element
        dtype = {self._layout.codes: torch.uint8, self._layout.scales: torch.float8_e4m3fn}.get(suffix, torch.float32)

        def load(
            param: Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: Projection,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            rows, columns = self._members[shard_id]
            target = param.data[expert_id]
            if shard_id != "w2":
                target = target[:rows] if shard_id == "w1" else target[rows:]
            if suffix in packing:
                dim = 1 if shard_id == "w2" else 0
                own = target.shape[dim]
                shape = [rows, columns // packing[suffix]]
                shape[dim] *= self.moe.tp_size
            else:
                shape = [1]
            loaded = loaded_weight
            if loaded.dtype != dtype or (list(loaded.shape) != shape and [loaded.numel()] != shape):
                where = f"{self._name(expert_id, shard_id)}.{suffix}"
                raise QuantError(f"{where}: expected {dtype} {shape}, got {loaded.dtype} {list(loaded.shape)}", _REMEDY)
            if suffix in packing:
                loaded = loaded.narrow(dim, self.moe.tp_rank * own, own)
            target.copy_(loaded)
            self._loaded.add((suffix, shard_id, expert_id))
            return True

        return load

    def _row_factor(
        self,
        expert: int,
        projections: tuple[Projection, ...],
        codes: torch.Tensor,
        scales: torch.Tensor,
        globals_: torch.Tensor,
    ) -> torch.Tensor:
        """The row factors float32 [N] of one expert's matrix. Raises QuantError if a tensor is missing or malformed."""
        factors = []
        start = 0
        for projection in projections:
            name = self._name(expert, projection)
            for suffix in self._suffixes:
                if (suffix, projection, expert) not in self._loaded:
                    raise QuantError(f"{name}.{suffix}: expected a tensor, got none", _REMEDY)
            rows = slice(start, start + self._members[projection][0])
            start = rows.stop
            tensors = dict(zip(self._suffixes, (codes[rows], scales[rows], globals_[rows][:1]), strict=True))
            factors.append(read_linear(self._layout, tensors, name, self.group_size).row_factor)
        return torch.cat(factors)

    def _name(self, expert: int, projection: Projection) -> str:
        return f"{self.prefix}.{expert}.{projection}"

    def _refuse_unknown_kinds(self, layer: Any) -> None:
        activation = layer.activation.value
        for refused, what, remedy in (
            (layer.use_ep, "expert parallelism", "Leave --enable-expert-parallel out: tensor parallelism splits them"),
            (self.moe.has_bias, "biases", "Serve another model"),
            (activation != MoEActivation.SILU.value, f"activation {activation}", "Serve another model"),
            (layer.apply_router_weight_on_input, "router weights on the input", "Serve another model"),
        ):
            if refused:
                expected = "gated SiLU experts, each split over all ranks"
                raise NotImplementedError(f"{self.prefix}: expected {expected}, got {what}. {remedy}")

    def _refuse_pre_quant_scale(self, *_args: Any, **_options: Any) -> bool:
        raise QuantError(
            f"{self.prefix}.*.{PRE_QUANT_SCALE}: expected experts without one, got an NVFP4_AWQ model's",
            "Choose an NVFP4 or W4A16_NVFP4 export of the model",
        )

    def _misfit(self, columns: int, whole: int) -> str:
        sizes = [size for size in range(1, 17) if whole % (size * self.group_size) == 0]
        works = ", ".join(map(str, sizes)) or "no"
        return (
            f"{self.prefix}: expected input features per rank that are a multiple of the group size {self.group_size}, "
            f"got {columns} of {whole}; tensor-parallel sizes that work for these experts: {works}"
        )


def pack_experts(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs codes uint8 [E, N, K/2] and scales [E, N, K/g] into the layout of their device, expert by expert.

    It packs in place if the packed layout is no larger. Then loading needs memory for one more expert instead of all.
    """
    out: list[torch.Tensor] = []
    for expert in range(len(codes)):
        packed = torch.ops.voltserve.nvfp4_pack(codes[expert], scales[expert], group_size)
        if not out:
            out = [_room_for(len(codes), part, whole) for part, whole in zip(packed, (codes, scales), strict=True)]
        for whole, part in zip(out, packed, strict=True):
            _with_padding(whole[expert]).copy_(_with_padding(part))
    return out[0], out[1]


def _room_for(experts: int, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Memory for `experts` tensors like `part`, with its strides. It is `whole` itself if the shapes agree."""
    if part.is_contiguous():
        return whole if part.shape == whole.shape[1:] else part.new_empty(experts, *part.shape)
    padded = part.new_empty(experts, part.shape[0], part.stride(0))
    return padded.narrow(2, 0, part.shape[1])


def _with_padding(view: torch.Tensor) -> torch.Tensor:
    """The matrix behind `view` with its padding columns, where a layout may store bytes, too."""
    return view.as_strided((view.shape[0], max(view.stride(0), view.shape[1])), view.stride())


def _drop(*_args: Any, **_options: Any) -> bool:
    """Drops the input scales of W4A4 checkpoints: activations stay in 16 bits or more."""
    return True
