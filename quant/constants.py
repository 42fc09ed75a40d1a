"""Numbers and file names that several modules of `quant` share. Torch-free.

The limits of a number format stand beside its codec: E4M3's in quant/e4m3.py, E2M1's in quant/e2m1.py.
"""

# Weights per block scale: the sizes that NVFP4 tensors may have here, and the one that NVFP4 is defined with.
GROUP_SIZES = (16, 32)
DEFAULT_GROUP_SIZE = 16

# Files of every model directory.
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX_NAME = "model.safetensors.index.json"
