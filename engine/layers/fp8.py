"""The linear method of FP8 (E4M3) layers: W8A16. Activations keep their 16 bits or more, on every device.

While weights load, the parameters have the checkpoint's names, and a scale per row (and block). After loading
they become the one internal tensor, in the form that the chosen route computes with.
"""

from collections.abc import Callable
from typing import Any

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
from engine.layers.linear import choose_route
from engine.ops import kernel_devices
from quant.errors import QuantError
from quant.formats.fp8 import INPUT_SCALE, SCALES, WEIGHT
from quant.formats.fp8_linear import check, spread
from quant.formats.weights import WeightKind
from quant.tensor import FP8Tensor

_REMEDY = "Check the model's files with `voltserve verify` and fetch what is damaged again"

logger = init_logger(__name__)


@register_weight_loader_v2_supported_method
class Fp8LinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM's classes are untyped
    """y = x Wᵀ + b with W [N, K] in FP8, for one layer on one tensor-parallel rank."""

    def __init__(self, prefix: str, kind: WeightKind) -> None:
        self.prefix = prefix
        self.kind = kind
        self._loaded: dict[str, set[tuple[Any, ...]]] = {WEIGHT: set(), "scale": set()}
        self._dense = UnquantizedLinearMethod()
        self.route = choose_route(kernel_devices(), current_platform.device_type, torch.get_default_dtype(), bits=8)

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

        Scales are kept per row, so that vLLM's sharding of rows puts each beside its row, whatever the layer's kind.

        Raises:
            QuantError: K is not a multiple of what the kernels or the blocks of scales need on this rank.
        """
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if columns % self.kind.column_multiple and (columns != input_size or columns % 16):
            raise QuantError(self._misfit(columns, input_size), "Choose another --tensor-parallel-size")
        self._dtype = params_dtype
        self.group_size = self.kind.columns_per_scale(columns)
        groups = -(-columns // self.group_size)
        load = extra_weight_attrs["weight_loader"]
        # A head's rows are padded; its checkpoint has those of the vocabulary.
        whole = getattr(layer, "org_vocab_size", output_size)
        layer.register_parameter(
            WEIGHT,
            ModelWeightParameter(
                data=torch.empty(rows, columns, dtype=torch.float8_e4m3fn),
                input_dim=1,
                output_dim=0,
                weight_loader=self._weight_loader(load),
            ),
        )
        scale_loader = self._scale_loader(load, whole, -(-input_size // self.group_size) if groups > 1 else 1)
        unloaded = torch.full((rows, groups), torch.nan, dtype=torch.float32)
        for name in SCALES:  # one of them has the checkpoint's name
            param: Parameter
            if groups == 1:
                param = ChannelQuantScaleParameter(data=unloaded[:, 0], output_dim=0, weight_loader=scale_loader)
            else:
                param = GroupQuantScaleParameter(data=unloaded, input_dim=1, output_dim=0, weight_loader=scale_loader)
            layer.register_parameter(name, param)
        unused = Parameter(torch.empty(0), requires_grad=False)
        unused.weight_loader = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
        layer.register_parameter(INPUT_SCALE, unused)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Turns the parameters into the form that the route computes with.

        Raises:
            QuantError: a tensor is missing, a weight is NaN, or a scale is not a positive number.
        """
        tensor = self._read(layer)
        for name in (WEIGHT, *SCALES, INPUT_SCALE):
            delattr(layer, name)
        logger.info_once("FP8 linear layers: %s (%s)", self.route.name, self.route.reason)
        progress.decision("FP8 linear layers", self.route.name, self.route.reason)
        if self.route.name == "dense":
            layer.weight = Parameter(tensor.dequantize(self._dtype), requires_grad=False)
            self._dense.process_weights_after_loading(layer)
            return
        packed, scales = torch.ops.voltserve.fp8_pack(tensor.codes, tensor.scales, self.group_size)
        layer.packed = Parameter(packed, requires_grad=False)
        layer.scales = Parameter(scales, requires_grad=False)
        # Kept outside the module as well, since a module looks up its parameters at each call.
        self._operands = (packed, scales, tensor.shape[0], self.group_size)
        self._gemm = torch.ops.voltserve.fp8_linear.default

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] in x's dtype."""
        if self.route.name == "dense":
            dense: torch.Tensor = self._dense.apply(layer, x, bias)
            return dense
        y: torch.Tensor = self._gemm(x, *self._operands, bias)
        return y

    def _read(self, layer: Any) -> FP8Tensor:
        members = set().union(*self._loaded.values())
        for name, loaded in self._loaded.items():
            for member in members - loaded or (() if loaded else ((),)):
                what = WEIGHT if name == WEIGHT else " or ".join(SCALES)
                raise QuantError(f"{self._describe(what, member)}: expected a tensor, got none", _REMEDY)
        codes = layer.weight.data
        scales = torch.stack([getattr(layer, name).data for name in SCALES])
        # Of the two names each member has one. Rows that pad a head have none.
        found = torch.where(scales[0].isnan(), scales[1], scales[0]).view(codes.shape[0], -1)
        check(codes, found, self.prefix, SCALES[0])
        return FP8Tensor(codes, found.contiguous(), self.group_size)

    def _weight_loader(self, load: Callable[..., None]) -> Callable[..., None]:
        def checked(param: Parameter, loaded: torch.Tensor, *member: Any) -> None:
            if loaded.dtype != torch.float8_e4m3fn:
                got = f"{loaded.dtype} {list(loaded.shape)}"
                raise QuantError(f"{self._describe(WEIGHT, member)}: expected {param.dtype}, got {got}", _REMEDY)
            self._load(load, WEIGHT, param, loaded, member)
            self._loaded[WEIGHT].add(member)

        return checked

    def _scale_loader(self, load: Callable[..., None], rows: int, groups: int) -> Callable[..., None]:
        """Loads a scale per tensor, per row or per block, spread over rows.

        `rows`: of the whole layer. vLLM cuts from them those of the member and the rank.
        """

        def checked(param: Parameter, loaded: torch.Tensor, *member: Any) -> None:
            blocks = loaded.numel() // groups
            own = rows if loaded.numel() == 1 or groups > 1 else loaded.numel()
            if not loaded.is_floating_point() or loaded.numel() % groups or not blocks:
                got = f"{loaded.dtype} {list(loaded.shape)}"
                expected = f"floats, {groups} per row or one in all"
                raise QuantError(f"{self._describe(SCALES[0], member)}: expected {expected}, got {got}", _REMEDY)
            scales = spread(loaded, own, groups)
            own_shape = scales if param.dim() > 1 else scales[:, 0]
            self._load(load, SCALES[0], param, own_shape, member, stored=loaded)
            self._loaded["scale"].add(member)

        return checked

    def _load(
        self,
        load: Callable[..., None],
        name: str,
        param: Parameter,
        loaded: torch.Tensor,
        member: tuple[Any, ...],
        stored: torch.Tensor | None = None,
    ) -> None:
        try:
            load(param, loaded, *member)
        except (AssertionError, RuntimeError) as error:  # vLLM and torch raise these for a shape that does not fit
            expected = f"a shape that this rank's {list(param.shape)} is cut from"
            shown = loaded if stored is None else stored
            got = f"{shown.dtype} {list(shown.shape)}"
            raise QuantError(f"{self._describe(name, member)}: expected {expected}, got {got}", _REMEDY) from error

    def _describe(self, name: str, member: tuple[Any, ...]) -> str:
        return f"{self.prefix}.{name}" + (f", member {member[0]!r}" if member else "")

    def _misfit(self, columns: int, input_size: int) -> str:
        multiple = self.kind.column_multiple
        works = ", ".join(str(tp) for tp in range(1, 17) if input_size % (tp * multiple) == 0) or "no"
        return (
            f"{self.prefix}: expected input features per rank that are a multiple of {multiple} ({self.kind}), "
            f"got {columns} of {input_size}; tensor-parallel sizes that work for this layer: {works}"
        )
