"""Our layers: which layers of a checkpoint are NVFP4, and what computes each kind."""
