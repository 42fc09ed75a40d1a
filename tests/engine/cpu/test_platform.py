from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform

from engine.cpu.platform import RecordingCpuPlatform
from engine.steps import recording


def config(mode: CompilationMode | None, *, hybrid: bool = False) -> Any:
    compilation = SimpleNamespace(mode=mode, backend="inductor")
    return SimpleNamespace(compilation_config=compilation, model_config=SimpleNamespace(is_hybrid=hybrid))


def test_steps_are_recorded_and_nothing_is_compiled(told: dict[str, str]) -> None:
    plain = config(None)
    RecordingCpuPlatform.apply_config_platform_defaults(plain)
    compilation = plain.compilation_config
    assert (compilation.mode, compilation.backend) == (CompilationMode.DYNAMO_TRACE_ONCE, recording.BACKEND)
    assert told == {recording.WHAT: recording.RECORDED}
    assert RecordingCpuPlatform.simple_compile_backend == "eager"


def test_a_model_with_recurrent_layers_runs_eagerly(told: dict[str, str]) -> None:
    hybrid = config(None, hybrid=True)
    RecordingCpuPlatform.apply_config_platform_defaults(hybrid)
    assert hybrid.compilation_config.mode == CompilationMode.NONE
    assert told == {recording.WHAT: "eager"}


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_what_the_user_asked_for_stays(mode: CompilationMode, told: dict[str, str]) -> None:
    """`--enforce-eager` has become mode NONE by then."""
    asked = config(mode)
    RecordingCpuPlatform.apply_config_platform_defaults(asked)
    assert asked.compilation_config == SimpleNamespace(mode=mode, backend="inductor")
    assert told == {}


@pytest.mark.parametrize(("asked", "becomes"), [("fp8_e4m3", "auto"), ("fp8", "auto"), ("bfloat16", "bfloat16")])
def test_a_checkpoint_s_fp8_cache_is_kept_in_the_activations_dtype(
    asked: str, becomes: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def vllm_s(cls: type, vllm_config: Any) -> None:
        seen.append(vllm_config.cache_config.cache_dtype)

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(vllm_s))
    cache, parallel = SimpleNamespace(cache_dtype=asked), SimpleNamespace(distributed_executor_backend="uni")
    given = SimpleNamespace(cache_config=cache, parallel_config=parallel, model_config=None)
    RecordingCpuPlatform.check_and_update_config(given)
    assert seen == [becomes]
    assert told == ({} if asked == becomes else {"KV cache dtype": "the activations'"})


@pytest.mark.parametrize(("bound", "kept"), [("nobind", "uni"), ("auto", "mp")])
def test_one_process_computes_where_its_environment_says_with_how_many_threads(
    bound: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vllm_s(cls: type, vllm_config: Any) -> None:
        vllm_config.parallel_config.distributed_executor_backend = "mp"

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(vllm_s))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    cache, parallel = SimpleNamespace(cache_dtype="auto"), SimpleNamespace(distributed_executor_backend="uni")
    given = SimpleNamespace(cache_config=cache, parallel_config=parallel, model_config=None)
    RecordingCpuPlatform.check_and_update_config(given)
    assert parallel.distributed_executor_backend == kept


def test_vllm_runs_on_it_where_its_cpu_build_is_installed() -> None:
    assert type(current_platform) is RecordingCpuPlatform
    assert current_platform.is_cpu()
