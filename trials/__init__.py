"""Measurements and trials: the logic of what `scripts/` starts by hand.

Nothing that is installed imports this package, and it does not import `scripts`.

cpu_*           three servers on one CPU
gateway_*, paced_engine    the gateway's cost
bench_peers     our bench beside vLLM's
cluster_simulation    many machines behind one gateway
gemm_times, layer_times, attention_times    kernels on a GPU
served, answers, compare, routing*    one engine's answers beside another's
decoding*, profiles, faulty    a large model in one engine
reduce_*        all-reduces of several GPUs
triton_*        Triton's kernels on Volta
engine_diff     another vLLM release beside ours
"""
