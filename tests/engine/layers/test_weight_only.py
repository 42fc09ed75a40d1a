"""Quantizations that vLLM computes, on Volta: the capability that vLLM demands against our table."""

from __future__ import annotations

import pytest
from vllm.model_executor.kernels.linear.mixed_precision.exllama import ExllamaLinearKernel
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.utils.marlin_utils import query_marlin_supported_quant_types

from engine import patches
from quant.formats.others import OTHERS

VOLTA = 70
# Computed by what we put in the place of vLLM's.
OURS = {"awq"}


@pytest.mark.parametrize("name", [name for name in OTHERS if name in QUANTIZATION_METHODS])
def test_the_table_agrees_with_the_capability_that_vllm_demands(name: str) -> None:
    demanded = get_quantization_config(name).get_min_capability()
    if OTHERS[name].volta:
        assert demanded <= VOLTA or name in OURS
    elif "vLLM demands" in OTHERS[name].why:
        assert OTHERS[name].why == f"vLLM demands {demanded / 10:.1f}"


def test_every_method_of_vllm_is_in_the_table_or_ours() -> None:
    elsewhere = {"quasarnvfp4", "compressed-tensors", "modelopt_fp4", "modelopt_mixed", "inc", "cpu_awq"}
    assert set(QUANTIZATION_METHODS) - set(OTHERS) <= elsewhere


def test_no_gptq_model_becomes_marlin_s_on_volta() -> None:
    """gptq_marlin takes over what this lists; with nothing listed gptq stays gptq, without a flag."""
    import vllm.model_executor.layers.quantization.utils.marlin_utils as marlin

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(marlin.current_platform, "is_cpu", lambda: False)
        patched.setattr(marlin.current_platform, "is_rocm", lambda: False)
        assert query_marlin_supported_quant_types(device_capability=VOLTA) == []
        assert query_marlin_supported_quant_types(device_capability=75) != []


def test_integer_compressed_tensors_are_admitted_with_exllama_s_kernels() -> None:
    patches.apply()
    scheme = compressed_tensors.CompressedTensorsWNA16(strategy="group", num_bits=4, group_size=128)
    assert scheme.get_min_capability() == VOLTA
    assert ExllamaLinearKernel.get_min_capability() <= VOLTA
    assert scheme.quant_type in ExllamaLinearKernel.SUPPORTED_QUANT_TYPES
