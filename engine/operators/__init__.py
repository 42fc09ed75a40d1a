"""The operators that vLLM's Python calls and its own compiled code would define."""
