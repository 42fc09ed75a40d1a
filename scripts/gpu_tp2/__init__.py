"""Trials of tensor parallelism on two GPUs (scripts/gpu_tp2.sh): `python -m scripts.gpu_tp2.NAME`."""
