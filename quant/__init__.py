"""NVFP4 numbers and checkpoint files: codecs, the one internal tensor, formats, quantization, model fetching."""
