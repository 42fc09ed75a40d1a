"""The layers and batches that are timed on GPUs and computed for V100s, so that both tables have the same rows."""

# (layer, N, K): what one rank multiplies by. Q8: Qwen3-32B; Q27: Qwen3.8-27B (GDN: its linear-attention layers).
LINEAR = (
    ("Qwen3-32B TP1 qkv", 10240, 5120),
    ("Qwen3-32B TP1 o", 5120, 8192),
    ("Qwen3-32B TP1 gate_up", 51200, 5120),
    ("Qwen3-32B TP1 down", 5120, 25600),
    ("Qwen3-32B TP2 qkv", 5120, 5120),
    ("Qwen3-32B TP2 o", 5120, 4096),
    ("Qwen3-32B TP2 gate_up", 25600, 5120),
    ("Qwen3-32B TP2 down", 5120, 12800),
    ("Qwen3.8-27B TP1 gate_up", 34816, 5120),
    ("Qwen3.8-27B TP1 down", 5120, 17408),
    ("Qwen3.8-27B TP1 GDN in", 16480, 5120),
    ("Qwen3.8-27B TP1 GDN out", 5120, 6144),
    ("Qwen3.8-27B TP2 gate_up", 17408, 5120),
    ("Qwen3.8-27B TP2 down", 5120, 8704),
    ("Qwen3.8-27B TP2 GDN in", 8240, 5120),
    ("Qwen3.8-27B TP2 GDN out", 5120, 3072),
)

# (model and rank, query heads, key heads, head size)
ATTENTION = (
    ("Qwen3-32B TP2", 32, 4, 128),
    ("Qwen3-32B TP1", 64, 8, 128),
    ("Qwen3.8-27B TP2", 12, 2, 256),
    ("Llama-3.1-8B TP1", 32, 8, 128),
    ("Phi-3-mini TP1", 32, 32, 96),
    ("SmolLM2-135M TP1", 9, 3, 64),
)
# (requests, new tokens, positions)
BATCHES = ((1, 1, 8192), (8, 1, 1024), (8, 1, 8192), (32, 1, 2048), (1, 1, 131072), (8, 4, 8192))
SKEWED = (32768, *(512,) * 7)  # one long request among short ones
