"""A model's step, recorded once and then replayed without its modules, on CPUs and on V100s.

Between a decoding step's few hundred operations Python walks through the layers' modules. That takes as long as the
operations do. Dynamo records the operations while the engine warms up, as one list for any number of tokens. Nothing
is compiled, so no compiler is needed and recording takes seconds.

There are two Dynamo backends:

- `replay`, on CPUs, keeps the operations. It only unwraps those that vLLM hides from compilers in operators of Python.
- `replay_fused`, on GPUs, also fuses neighbours (engine/steps/fusion.py). CUDA graphs are captured from its result.

Imports at the top are the standard library's, so that `engine.explain` can call `choose` without vLLM.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine import ops, progress
from engine.environment import NO_DYNAMO
from engine.steps import fusion
from engine.volta import Choice

if TYPE_CHECKING:
    import torch
    from torch import fx, nn
    from vllm.config import CompilationConfig

WHAT = "steps of the model"
RECORDED = "recorded"
BACKEND, FUSED_BACKEND = f"{__name__}.replay", f"{__name__}.replay_fused"  # by name, as torch asks for them
BACKENDS = (BACKEND, FUSED_BACKEND)
Step = Callable[..., Any]


def choose(*, hybrid: bool, disabled: bool, gpu: bool) -> Choice:
    """Whether steps are recorded.

    `hybrid`: the model has recurrent layers. `disabled`: NO_DYNAMO is set. `gpu`: operations are fused as well.
    """
    if disabled:
        return Choice(WHAT, "eager", f"{NO_DYNAMO} asks for it")
    if hybrid:
        return Choice(WHAT, "eager", "the model has recurrent layers, whose steps are not recorded")
    fused = "; neighbouring small ones are fused, also in CUDA graphs, and compared with the modules' before serving"
    return Choice(WHAT, RECORDED, f"replaying operations without the model's modules is faster{fused if gpu else ''}")


def disabled() -> bool:
    """Whether the environment keeps Dynamo from recording."""
    return os.environ.get(NO_DYNAMO, "0") == "1"


def record(compilation: "CompilationConfig", backend: str = BACKEND) -> None:
    """Has vLLM record the model's steps with `backend`, BACKEND or FUSED_BACKEND."""
    from vllm.config import CompilationMode

    compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
    compilation.backend = backend
    # Otherwise vLLM asks the backend for files to load at the next start.
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"


def allow_eager(model: "nn.Module") -> None:
    """Makes a `model` whose steps cannot be recorded run eagerly, and report it. The engine would fail to start."""
    module: Any
    for module in model.modules():
        if (recorded := getattr(module, "_compiled_callable", None)) is not None:  # vLLM's name
            module._compiled_callable = _or_eager(model, module, recorded)


def _or_eager(model: "nn.Module", module: Any, recorded: Step) -> Step:
    from torch._dynamo.exc import TorchDynamoException

    def step(*inputs: Any, **named: Any) -> Any:
        try:
            return recorded(*inputs, **named)
        except TorchDynamoException as error:
            module._compiled_callable = None
            module.do_not_compile = True  # vLLM's name, too
            call_attention_directly(model)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = " ".join(lines[:2])  # torch says first where, then what
            progress.decision(WHAT, "eager", f"they could not be recorded: {reason}")
            return module.forward(*inputs, **named)

    return step


def recorded_modules(model: "nn.Module") -> "list[Any]":
    """The modules of `model` whose steps are recorded."""
    return [module for module in model.modules() if getattr(module, "_compiled_callable", None) is not None]


def use_recorded(model: "nn.Module", wanted: bool) -> None:
    """From now on replays the recorded steps of `model`, or runs its modules."""
    recorded = recorded_modules(model)
    for module in recorded:
        module.do_not_compile = not wanted
    if recorded:
        call_attention_directly(model, not wanted)


def call_attention_directly(model: "nn.Module", wanted: bool = True) -> None:
    """Makes attention layers call their backend directly. The operator that wraps the call serves only recording."""
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        if isinstance(module, Attention):
            module.use_direct_call = wanted


def replay(module: "fx.GraphModule", _inputs: "Sequence[torch.Tensor]") -> Step:
    """The recorded operations, with `direct` applied, as a function of Python."""
    direct(module.graph)
    return _step(module)


def replay_fused(module: "fx.GraphModule", _inputs: "Sequence[torch.Tensor]") -> Step:
    """As `replay`, with neighbouring operations fused if the kernels for that are installed."""
    direct(module.graph)
    progress.settle(fusion.fuse(module.graph) if "cuda" in ops.kernel_devices() else fusion.WITHOUT_KERNELS)
    return _step(module)


def _step(module: "fx.GraphModule") -> Step:
    module.recompile()
    step: Step = module.forward
    return step


def direct(graph: "fx.Graph") -> None:
    """Replaces vLLM's operators of Python by the functions that they call: attention, all-reduces and experts.

    The cache update and attention become one call. Where a module takes a parameter's `.data`, the graph takes the
    parameter.
    """
    import torch
    from vllm.distributed.parallel_state import all_reduce
    from vllm.model_executor.layers.attention.attention import unified_attention_with_output
    from vllm.model_executor.layers.fused_moe.runner import moe_runner as moe

    operators = torch.ops.vllm
    functions = {
        operators.unified_attention_with_output: unified_attention_with_output,
        operators.all_reduce: all_reduce,
        operators.moe_forward: moe._moe_forward,
        operators.moe_forward_shared: moe._moe_forward_shared,
    }
    for node in list(graph.nodes):
        target = getattr(node.target, "overloadpacket", node.target)
        if target is operators.unified_kv_cache_update:
            (attention,) = node.users  # it reads the update's empty result, which keeps their order
            attention.target = ops.update_and_attend
            attention.kwargs = {}
            graph.erase_node(node)
        elif getattr(target, "__name__", "") == "_get_data_attr":  # torch's name
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif target in functions:
            node.target = functions[target]
