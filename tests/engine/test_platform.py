"""VoltaPlatform, on vLLM's CUDA platform without a GPU: its compiled operators are stood in for by empty modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from engine import environment, gpus, volta
from engine.steps import recording

PAIRS = [{"source": 0, "destination": 1, "peer_access": True, "wrong": 0}]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from engine import platform

    monkeypatch.setattr(gpus, "physical_indexes", lambda: (2, 0))
    probe = platform.try_peer_memory
    probe.cache_clear()
    yield platform
    probe.cache_clear()


def config(**changes: Any) -> Any:
    """What the platform looks at of a VllmConfig."""
    model = SimpleNamespace(
        dtype=torch.float16,
        enforce_eager=False,
        is_mm_prefix_lm=False,
        is_hybrid=False,
        use_mla=False,
        architectures=["Qwen3ForCausalLM"],
        hf_config=SimpleNamespace(model_type="qwen3", quantization_config=None),
    )
    parallel = SimpleNamespace(worker_cls="auto", tensor_parallel_size=1, disable_custom_all_reduce=False)
    made = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_offloading_size=None),
        parallel_config=parallel,
        lora_config=None,
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(),
        additional_config={},
        compilation_config=SimpleNamespace(mode=None, cudagraph_mode=None, backend=""),
    )
    for part, values in changes.items():
        vars(getattr(made, part)).update(values)
    return made


def test_every_gpu_counts_as_compute_capability_7_0(platform: Any) -> None:
    one = platform.VoltaPlatform()
    assert one.get_device_capability(1) == (7, 0)
    assert one.has_device_capability(70)
    assert one.has_device_capability((7, 0))
    assert not one.has_device_capability(75)
    assert not one.has_device_capability((8, 0))
    assert one.is_cuda()
    assert torch.bfloat16 not in one.supported_dtypes


def test_cudas_index_is_turned_into_nvmls(platform: Any) -> None:
    assert [platform.VoltaPlatform.device_id_to_physical_device_id(index) for index in (0, 1)] == [2, 0]


@pytest.mark.parametrize(
    ("asked", "enforce_eager", "mode", "graphs"),
    [
        (None, False, CompilationMode.DYNAMO_TRACE_ONCE, CUDAGraphMode.FULL_DECODE_ONLY),
        (CompilationMode.NONE, True, CompilationMode.DYNAMO_TRACE_ONCE, None),
        (CompilationMode.VLLM_COMPILE, False, CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_DECODE_ONLY),
    ],
)
def test_decoding_is_captured_whole_and_nothing_is_compiled(
    platform: Any, told: dict[str, str], asked: Any, enforce_eager: bool, mode: Any, graphs: Any
) -> None:
    vllm_config = config(model_config={"enforce_eager": enforce_eager}, compilation_config={"mode": asked})
    platform.VoltaPlatform.apply_config_platform_defaults(vllm_config)
    assert vllm_config.compilation_config.mode == mode
    assert vllm_config.compilation_config.cudagraph_mode == graphs
    assert (told["CUDA graphs"] == "off") == enforce_eager
    recorded = asked != CompilationMode.VLLM_COMPILE
    assert (vllm_config.compilation_config.backend == recording.FUSED_BACKEND) == recorded


@pytest.mark.parametrize(("hybrid", "disabled"), [(True, "0"), (False, "1")])
def test_eager_steps_that_are_not_recorded(
    platform: Any, told: dict[str, str], monkeypatch: pytest.MonkeyPatch, hybrid: bool, disabled: str
) -> None:
    monkeypatch.setenv(environment.NO_DYNAMO, disabled)
    asked = {"mode": CompilationMode.NONE}
    vllm_config = config(model_config={"enforce_eager": True, "is_hybrid": hybrid}, compilation_config=asked)
    platform.VoltaPlatform.apply_config_platform_defaults(vllm_config)
    assert vllm_config.compilation_config.mode == CompilationMode.NONE
    assert told[recording.WHAT] == "eager"


def test_a_checkpoints_8_bit_cache_is_kept_in_float16(platform: Any, told: dict[str, str]) -> None:
    wish = {"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"}
    hf_config = SimpleNamespace(model_type="qwen3", quantization_config=wish)
    vllm_config = config(cache_config={"cache_dtype": "fp8_e4m3"}, model_config={"hf_config": hf_config})
    platform.VoltaPlatform.check_and_update_config(vllm_config)
    assert vllm_config.cache_config.cache_dtype == "auto"
    assert told["KV cache dtype"] == "float16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_config": {"cache_dtype": "fp8"}}, "--kv-cache-dtype: expected auto or float16"),
        ({"model_config": {"dtype": torch.float32}}, "--dtype: expected float16 on a V100"),
    ],
)
def test_what_a_v100_does_not_compute_in_is_refused(
    platform: Any, told: dict[str, str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        platform.VoltaPlatform.check_and_update_config(config(**changes))


@pytest.mark.parametrize(
    ("linked", "variable", "pairs", "expected"),
    [
        (False, "1", PAIRS, "host memory"),
        (True, "0", PAIRS, "peer memory"),
        (True, "1", PAIRS, "host memory"),
        (True, "0", [{**PAIRS[0], "wrong": 3}], "host memory"),
        (True, "0", [{**PAIRS[0], "peer_access": False}], "host memory"),
    ],
)
def test_workers_learn_where_ranks_meet_and_vllms_own_all_reduce_is_off(
    platform: Any,
    told: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    linked: bool,
    variable: str,
    pairs: list[dict[str, Any]],
    expected: str,
) -> None:
    tried: list[int] = []

    def try_out(ranks: int) -> str:
        tried.append(ranks)
        problem: str = platform.judge_pairs(pairs)
        return problem

    monkeypatch.setattr(platform, "try_peer_memory", try_out)
    monkeypatch.setattr(platform.VoltaPlatform, "is_fully_connected", lambda _ids: linked)
    monkeypatch.setenv("NCCL_P2P_DISABLE", variable)
    vllm_config = config(parallel_config={"tensor_parallel_size": 2})
    platform.VoltaPlatform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.disable_custom_all_reduce
    assert tried == ([2] if linked and variable == "0" else [])
    assert told["all-reduce"] == expected
    assert vllm_config.additional_config == {volta.ALL_REDUCE_KEY: expected}


def test_the_platforms_communicator_is_one_of_vllms_cuda_ranks(platform: Any) -> None:
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    found = resolve_obj_by_qualname(platform.VoltaPlatform.get_device_communicator_cls())
    assert issubclass(found, CudaCommunicator)
    assert found is not CudaCommunicator


@pytest.mark.parametrize(
    ("code", "limit", "expected"),
    [
        ("import time; time.sleep(30)", 0.2, "no answer within 0.2 s"),
        ("raise SystemExit('no device')", 20.0, "the probe exited with 1: no device"),
        ("print('noise'); print('{\"pairs\": []}')", 20.0, ""),
    ],
)
def test_a_probe_that_hangs_or_fails_counts_against_peer_memory(
    platform: Any, monkeypatch: pytest.MonkeyPatch, code: str, limit: float, expected: str
) -> None:
    run = subprocess.run

    def run_instead(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "engine.probes.p2p"]
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(platform.subprocess, "run", run_instead)
    monkeypatch.setattr(platform, "PROBE_LIMIT", limit)
    assert platform.try_peer_memory(2) == expected


def selector(head_size: int) -> AttentionSelectorConfig:
    return AttentionSelectorConfig(head_size, torch.float16, "auto", None)


@pytest.mark.parametrize("head_size", [64, 128, 72])
def test_the_attention_chosen_is_told_and_can_be_loaded(platform: Any, told: dict[str, str], head_size: int) -> None:
    path = platform.VoltaPlatform.get_attn_backend_cls(None, selector(head_size))
    assert path == AttentionBackendEnum[told["attention backend"]].get_path()


def test_the_users_attention_is_checked_by_vllm(platform: Any, told: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="FLASHINFER"):
        platform.VoltaPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASHINFER, selector(64))
