"""Models in the likeness of public ones: their shapes, and small random checkpoints with their tensors' names.

Tests, trials on GPUs and the tables of `perfmodel` share them. Nothing that is installed imports this package, and it
imports `quant` only.

public_models   shapes of public models as header entries, without any file
quasar_config   config.json of Qwen3.8-27B-QUASAR-NVFP4, at its true sizes and small
quasar          a small model of that configuration, beside its dequantized twin
random_models   small random models in every format that is read, beside their twins
checkpoint_writer    random shards and their index
decoder_checkpoints, hybrid_checkpoint    random checkpoints of true sizes
linears         one linear's tensors, beside its values
auto_round      AutoRound's quantization_config
"""
