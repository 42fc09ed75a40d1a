"""The overlay that makes stock vLLM serve NVFP4 models: plugins, launcher, patch manifest."""
