import pytest

from lookalikes.auto_round import CONFIG
from quant.errors import QuantError
from quant.formats import auto_round, compressed_tensors


def test_the_config_is_read_and_the_tensors_decide_what_is_quantized():
    scheme = auto_round.read_config(CONFIG, "config.json")

    assert (scheme.format, scheme.layout, scheme.group_size) == ("auto-round", compressed_tensors.LAYOUT, 16)
    assert scheme.w4a4
    assert scheme.ignore is None


def test_without_quantized_activations_it_is_weight_only():
    assert not auto_round.read_config({**CONFIG, "act_bits": 16}, "config.json").w4a4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3", "data_type": "nvfp4_v2"},
            r"expected NVFP4 with E4M3 block scales, got the E5M3 variant \(auto_round:llm_compressor_nvfp4_e5m3,",
        ),
        ({"data_type": "mx_fp", "group_size": 32}, r"data_type: expected 'nv_fp' \(NVFP4\), got 'mx_fp' \(MXFP4\)"),
        ({"packing_format": "auto_round:auto_gptq"}, "packing_format: expected 'auto_round:llm_compressor', got"),
        ({"data_type": "int"}, "data_type: expected 'nv_fp', got 'int'"),
        ({"data_type": None}, "data_type: expected a string, got null"),
        ({"bits": 8}, "bits: expected 4, got 8"),
        ({"group_size": 128}, "group_size: expected 16 or 32, got 128"),
        (
            {"extra_config": {"model.layers.3.mlp.down_proj": {"bits": 8}}},
            r"extra_config: model\.layers\.3\.mlp\.down_proj: expected 4 or 16 bits, got 8",
        ),
    ],
)
def test_a_config_that_is_not_nvfp4_is_refused_naming_the_key(changed, message):
    with pytest.raises(QuantError, match=rf"^config\.json: {message}"):
        auto_round.read_config({**CONFIG, **changed}, "config.json")
