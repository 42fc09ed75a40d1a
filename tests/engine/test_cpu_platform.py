from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from engine import recording
from engine.cpu_platform import RecordingCpuPlatform


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


def test_vllm_runs_on_it_where_its_cpu_build_is_installed() -> None:
    assert type(current_platform) is RecordingCpuPlatform
    assert current_platform.is_cpu()
