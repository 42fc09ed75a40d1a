"""Importing this registers torch.ops.voltserve.*, with implementations for tracing. contracts/*.h says what they do.

On the CPU the ops use as many threads as torch does at import; torch.ops.voltserve.set_cpu_threads(n) changes that.
"""

from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).with_name("ops.so")))
torch.ops.voltserve.set_cpu_threads(torch.get_num_threads())


def _writes_only(schema: torch.FunctionSchema) -> bool:
    return not schema.returns and any(argument.is_write for argument in schema.arguments)


# Such an op has nothing to make while a step is traced. Each other op that is traced has a fake below for its result.
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("voltserve::") and _writes_only(torch._C._get_schema(*_name.partition(".")[::2])):
        torch.library.register_fake(_name, lambda *_arguments, **_named: None)


@torch.library.register_fake("voltserve::nvfp4_linear")
def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_factor: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], row_factor.shape[0]))


@torch.library.register_fake("voltserve::nvfp4_moe_linear")
def _moe_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_factor: torch.Tensor,
    group_size: int,
    slots: torch.Tensor,
    experts: torch.Tensor,
    padded_slots: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0] * top_k, row_factor.shape[1]))


@torch.library.register_fake("voltserve::nvfp4_dequantize")
def _dequantize(
    packed: torch.Tensor, scales: torch.Tensor, row_factor: torch.Tensor, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    return row_factor.new_empty((row_factor.shape[0], scales.shape[1] * group_size), dtype=dtype)


@torch.library.register_fake("voltserve::fp8_linear")
def _fp8_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    rows: int,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.register_fake("voltserve::fp8_dequantize")
def _fp8_dequantize(
    packed: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    return scales.new_empty((rows, columns), dtype=dtype)


@torch.library.register_fake("voltserve::linear16")
def _linear16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.register_fake("voltserve::rms_norm")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("voltserve::silu_and_mul")
def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake("voltserve::causal_conv1d")
def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None = None,
    continued: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def devices() -> list[str]:
    """The kinds of device that the kernels were built for, as torch names them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [kind for kind in ("cpu", "cuda") if has("voltserve::nvfp4_linear", kind.upper())]


def cpu_instruction_sets() -> list[str]:
    """The instruction sets that this CPU and the kernels have, fastest first. The first is used."""
    return torch.ops.voltserve._cpu_instruction_sets().split()
