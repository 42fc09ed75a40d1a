"""The quantization_config of an AutoRound NVFP4 checkpoint. Imports nothing."""

CONFIG: dict[str, object] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 4,
    "group_size": 16,
    "sym": True,
    "data_type": "nv_fp",
    "act_bits": 4,
    "act_data_type": "nv_fp4_with_static_gs",
    "act_dynamic": True,
    "block_name_to_quantize": "model.layers",
    "autoround_version": "0.8.0",
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
