"""The linear method of NVFP4 layers.

While weights load, the parameters have the names and layout of the checkpoint's format. After loading they become the
one internal tensor, in the form that the chosen route computes with.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Module, Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter
from vllm.platforms import current_platform

from engine import progress
from engine.ops import kernel_devices
from quant import e4m3
from quant.errors import QuantError
from quant.formats.linear import read_linear
from quant.formats.modelopt import PRE_QUANT_SCALE
from quant.formats.scheme import Scheme
from quant.tensor import NVFP4Tensor

_REMEDY = "Check the model's files with `voltserve verify` and fetch what is damaged again"

logger = init_logger(__name__)


@dataclass(frozen=True)
class Route:
    """What computes a quantized layer, with the reason."""

    name: Literal["kernels", "dense"]
    reason: str


def choose_route(kernel_devices: Collection[str], device: str, dtype: torch.dtype, bits: int = 4) -> Route:
    """Chooses what computes layers with weights of `bits` bits on `device` ("cpu", "cuda").

    `kernel_devices`: the devices that the installed voltserve_kernels has code for; empty if it is not installed.
    """
    if device in kernel_devices:
        return Route("kernels", f"voltserve_kernels has code for {device}: weights stay in {bits} bits")
    why = f"was built without code for {device}" if kernel_devices else "is not installed"
    to = str(dtype).removeprefix("torch.")
    return Route("dense", f"voltserve_kernels {why}: weights are dequantized once, to {to}, at load")


@register_weight_loader_v2_supported_method
class QuasarNvfp4LinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM's classes are untyped
    """y = x Wᵀ + b with W [N, K] in NVFP4, for one layer on one tensor-parallel rank."""

    def __init__(self, prefix: str, scheme: Scheme) -> None:
        self.prefix = prefix
        self.group_size = scheme.group_size
        self._scheme = scheme
        layout = self._layout = scheme.layout
        self._loaded: dict[str, set[tuple[Any, ...]]] = {
            name: set() for name in (layout.codes, layout.scales, layout.global_scale)
        }
        self._pre_quant_members: set[tuple[Any, ...]] = set()
        self._dense = UnquantizedLinearMethod()
        self.route = choose_route(kernel_devices(), current_platform.device_type, torch.get_default_dtype())

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes this rank's parameters: N = sum(output_partition_sizes) rows of K = input_size_per_partition columns.

        The global scale has one element per row, not one per member of a fused layer. Its loader spreads the
        checkpoint's scalar over all rows of the member. So vLLM's row sharding puts it beside the member's rows,
        whatever the layer's kind.

        Raises:
            QuantError: K is not a multiple of the group size on this rank.
        """
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if columns % self.group_size:
            raise QuantError(self._misfit(columns, input_size), "Choose another --tensor-parallel-size")
        self._member_sizes = output_partition_sizes
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        codes, scales, global_scale = (self._layout.codes, self._layout.scales, self._layout.global_scale)
        # A head's rows are padded; its checkpoint has those of the vocabulary.
        whole = getattr(layer, "org_vocab_size", output_size)
        unloaded = torch.full((rows, columns // self.group_size), e4m3.NAN, dtype=torch.uint8)
        layer.register_parameter(
            codes,
            ModelWeightParameter(
                data=torch.empty(rows, columns // 2, dtype=torch.uint8),
                input_dim=1,
                output_dim=0,
                weight_loader=self._loader(codes, load, torch.uint8),
            ),
        )
        layer.register_parameter(
            scales,
            GroupQuantScaleParameter(
                data=unloaded.view(torch.float8_e4m3fn),  # NaN, so that a scale that was never loaded is found
                input_dim=1,
                output_dim=0,
                weight_loader=self._loader(scales, load, torch.float8_e4m3fn),
            ),
        )
        layer.register_parameter(
            global_scale,
            ChannelQuantScaleParameter(
                data=torch.full((rows,), torch.nan, dtype=torch.float32),
                output_dim=0,
                weight_loader=self._loader(global_scale, load, torch.float32, spread_over=whole),
            ),
        )
        self._create_input_scales(layer, columns, input_size)

    def _create_input_scales(self, layer: Module, columns: int, input_size: int) -> None:
        # Activations stay in 16 bits or more, so the input scales of W4A4 checkpoints are read and dropped.
        unused = Parameter(torch.empty(0), requires_grad=False)
        unused.weight_loader = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
        layer.register_parameter(self._layout.input_scale, unused)
        if self._scheme.pre_quant_scale:
            scale = Parameter(torch.full((columns,), torch.nan, dtype=self._dtype), requires_grad=False)
            rank: Any = layer.tp_rank
            start = rank * columns if input_size != columns else 0
            scale.weight_loader = self._pre_quant_loader(slice(start, start + columns), input_size)  # type: ignore[attr-defined]
            layer.register_parameter(PRE_QUANT_SCALE, scale)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Turns the parameters into the form that the route computes with.

        Raises:
            QuantError: a tensor is missing, a scale is NaN, or a global scale is not a positive number.
        """
        tensor = self._read(layer)
        for name in (*self._loaded, self._layout.input_scale):
            delattr(layer, name)
        if self._scheme.pre_quant_scale and not self._pre_quant_members:
            # Exports fold most of these scales into norms and neighbouring weights.
            layer.register_parameter(PRE_QUANT_SCALE, None)
        self._report_route()
        if self.route.name == "dense":
            layer.weight = Parameter(tensor.dequantize(self._dtype), requires_grad=False)
            self._dense.process_weights_after_loading(layer)
        else:
            packed, scales = torch.ops.voltserve.nvfp4_pack(tensor.codes, tensor.block_scales, self.group_size)
            layer.packed = Parameter(packed, requires_grad=False)
            layer.scales = Parameter(scales, requires_grad=False)
            layer.row_factor = Parameter(tensor.row_factor, requires_grad=False)
            # Kept outside the module as well, since a module looks up its parameters at each call.
            self._operands = (packed, scales, tensor.row_factor, self.group_size)
            self._gemm = torch.ops.voltserve.nvfp4_linear.default

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] in x's dtype."""
        if self._pre_quant_members:
            x = x * layer.pre_quant_scale
        if self.route.name == "dense":
            y: torch.Tensor = self._dense.apply(layer, x, bias)
        else:
            y = self._gemm(x, *self._operands, bias)
        return y

    def _read(self, layer: Module) -> NVFP4Tensor:
        members = set().union(*self._loaded.values())
        shared = {PRE_QUANT_SCALE: self._pre_quant_members} if self._pre_quant_members else {}
        for name, loaded in (self._loaded | shared).items():
            for member in members - loaded:
                raise QuantError(f"{self._describe(name, member)}: expected a tensor, got none", _REMEDY)
        codes, scales, globals_ = (getattr(layer, name).data for name in self._loaded)
        if scales.to(torch.float16).isnan().any():
            raise QuantError(
                f"{self.prefix}.{self._layout.scales}: expected numbers, got NaN, or nothing was loaded", _REMEDY
            )
        factors = []
        start = 0
        for size in self._member_sizes:
            rows = slice(start, start + size)
            start += size
            tensors = dict(zip(self._loaded, (codes[rows], scales[rows], globals_[rows][:1]), strict=True))
            factors.append(read_linear(self._layout, tensors, self.prefix, self.group_size).row_factor)
        return NVFP4Tensor(codes, scales, torch.cat(factors), self.group_size)

    def _loader(
        self, name: str, load: Callable[..., None], dtype: torch.dtype, spread_over: int | None = None
    ) -> Callable[..., None]:
        """vLLM's weight loader for one parameter. It records loaded members and names a tensor that does not fit.

        `spread_over`: a scalar is spread over this many rows, those of the whole layer.
        """

        def checked_load(param: Parameter, loaded: torch.Tensor, *member: Any) -> None:
            got = f"{loaded.dtype} {list(loaded.shape)}"
            where = self._describe(name, member)
            if loaded.dtype != dtype or (spread_over is not None and loaded.numel() != 1):
                expected = f"{dtype} [1]" if spread_over is not None else str(dtype)
                raise QuantError(f"{where}: expected {expected}, got {got}", _REMEDY)
            try:
                load(param, loaded if spread_over is None else loaded.reshape(1).expand(spread_over), *member)
            except (AssertionError, RuntimeError) as error:  # vLLM and torch raise these for a shape that does not fit
                expected = f"a shape that this rank's {list(param.shape)} is cut from"
                raise QuantError(f"{where}: expected {expected}, got {got}", _REMEDY) from error
            self._loaded[name].add(member)

        return checked_load

    def _pre_quant_loader(self, own: slice, input_size: int) -> Callable[..., None]:
        """Loads this rank's part of `pre_quant_scale` [input_size].

        Members of a fused layer share their input, so they must share this scale.
        """

        def load(param: Parameter, loaded: torch.Tensor, *member: Any) -> None:
            where = self._describe(PRE_QUANT_SCALE, member)
            if tuple(loaded.shape) != (input_size,) or not loaded.isfinite().all():
                raise QuantError(f"{where}: expected {input_size} numbers, got {list(loaded.shape)}", _REMEDY)
            scale = loaded[own].to(param.device, param.dtype)
            if self._pre_quant_members and not torch.equal(param, scale):
                raise QuantError(
                    f"{where}: expected the values of the members loaded before, got others",
                    "Export the model again with ModelOpt, which makes them equal in fused layers",
                )
            param.data.copy_(scale)
            self._pre_quant_members.add(member)

        return load

    def _describe(self, name: str, member: tuple[Any, ...]) -> str:
        return f"{self.prefix}.{name}" + (f", member {member[0]!r}" if member else "")

    def _misfit(self, columns: int, input_size: int) -> str:
        whole_groups = [tp for tp in range(1, 17) if input_size % (tp * self.group_size) == 0]
        works = ", ".join(map(str, whole_groups)) or "no"
        return (
            f"{self.prefix}: expected input features per rank that are a multiple of the group size {self.group_size}, "
            f"got {columns} of {input_size}; tensor-parallel sizes that work for this layer: {works}"
        )

    def _report_route(self) -> None:
        logger.info_once("NVFP4 linear layers: %s (%s)", self.route.name, self.route.reason)
        progress.decision("NVFP4 linear layers", self.route.name, self.route.reason)
