"""The layers that are ours: which of them are NVFP4, and what computes each."""
