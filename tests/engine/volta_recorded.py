"""What a V100's step of a model is recorded and fused as, without a GPU: `python -m tests.engine.volta_recorded MODEL`.

Tensors have shapes but no numbers (device meta), and vLLM's operators are ours (engine/operators). Prints the names
of what the recorded step calls, one per line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"  # it would be made on a GPU

import torch
import vllm.platforms

from engine import gpus
from engine.operators import installation
from engine.steps import fusion, recording

patched_gpus: Any = gpus
patched_recording: Any = recording

TOKENS = 16


def pretend() -> None:
    """vLLM's CUDA platform for two V100s, as far as its classes ask."""
    installation.install()
    patched_gpus.physical_indexes = lambda: (0, 1)
    from engine.platform import VoltaPlatform

    VoltaPlatform.is_fully_connected = classmethod(lambda _cls, _ids: False)
    VoltaPlatform.get_device_name = classmethod(lambda _cls, _index=0: "Tesla V100")
    vllm.platforms._current_platform = VoltaPlatform()


def config_of(model: str) -> Any:
    """As `--enforce-eager` makes it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    return EngineArgs(
        model=model, dtype="float16", skip_tokenizer_init=True, enforce_eager=True, **sizes
    ).create_engine_config()


def build(config: Any) -> Any:
    """The model, with packed weights that are only shapes."""
    import voltserve_kernels  # noqa: F401 - registers torch.ops.voltserve, which kernel_devices would
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from engine.layers import attention, linear

    both: tuple[Any, ...] = (attention, linear)

    type(current_platform).device_type = "cpu"  # groups of one rank, over gloo
    parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    type(current_platform).device_type = "cuda"
    for module in both:
        module.kernel_devices = lambda: ["cuda"]
    with set_default_torch_dtype(torch.float16), torch.device("meta"):
        model = initialize_model(vllm_config=config)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, linear.QuasarNvfp4LinearMethod):
                rows, columns = sum(method._member_sizes), module.input_size_per_partition
                for name in (*method._loaded, method._layout.input_scale):
                    delattr(module, name)
                packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
                scales = torch.empty(rows, columns // method.group_size, dtype=torch.float8_e4m3fn)
                method._operands = (packed, scales, torch.empty(rows), method.group_size)
                method._gemm = torch.ops.voltserve.nvfp4_linear.default
    return model


def main() -> None:
    """See above."""
    pretend()
    config = config_of(sys.argv[1])
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    recorded: list[str] = []

    def keep(module: Any, inputs: Any) -> Any:
        recording.direct(module.graph)
        print(fusion.fuse(module.graph), file=sys.stderr)
        recorded.extend(getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes)
        return lambda *_inputs: (torch.empty(TOKENS, config.model_config.get_hidden_size(), device="meta"),)

    patched_recording.replay_fused = keep
    import vllm.ir

    config.kernel_config.ir_op_priority.set_default()  # as vLLM's worker does
    vllm.ir.set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)
    with set_current_vllm_config(config):
        model = build(config)
        inputs = torch.zeros(TOKENS, dtype=torch.long, device="meta")
        with set_forward_context(None, config):
            model(inputs, inputs)
    print("\n".join(recorded))


if __name__ == "__main__":
    main()
