from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models import jamba, mamba, registry

from engine.operators import check


def config(**changes: Any) -> SimpleNamespace:
    """What the check reads of vLLM's configuration: of a dense model, served without further flags."""
    model = {"model": "models/x", "use_mla": False, "is_moe": False, "architectures": ["LlamaForCausalLM"]}
    given = {"lora_config": None, "kv_transfer_config": None, "offloading": None} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | {key: given[key] for key in model if key in given}),
        lora_config=given["lora_config"],
        kv_transfer_config=given["kv_transfer_config"],
        cache_config=SimpleNamespace(kv_offloading_size=given["offloading"]),
    )


def test_an_ordinary_model_is_served() -> None:
    check.refuse(config())
    check.refuse(config(is_moe=True))
    check.refuse(config(lora_config=object()))
    check.refuse(config(kv_transfer_config=SimpleNamespace(kv_connector="ExampleConnector")))
    check.refuse(SimpleNamespace(model_config=None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_mla": True}, r"models/x: multi-head latent attention: .*_C\.mla_decode_kvcache.* Serve another model"),
        ({"architectures": ["JambaForCausalLM"]}, r"Mamba-1 layers: .*_C\.selective_scan_fwd"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "MiniMax M3"),
        ({"lora_config": object(), "is_moe": True}, "Leave out --enable-lora, and merge"),
        ({"offloading": 4.0}, r"swap_blocks_batch.*--kv-offloading-size"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")}, "--kv-transfer-config"),
    ],
)
def test_what_needs_an_operator_that_nobody_computes_is_refused_by_its_name(changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check.refuse(config(**changes))


def test_the_models_with_mamba_1_layers_are_those_of_vllm() -> None:
    assert jamba.MambaMixer is mamba.MambaMixer
    modules = {"jamba", "mamba"}
    found = {name for name, (module, _) in registry._VLLM_MODELS.items() if module in modules}
    assert found == set(check.MAMBA_1)
    assert set(check.MINIMAX_M3) <= set(registry._VLLM_MODELS)
