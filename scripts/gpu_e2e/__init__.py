"""Trials of the whole engine on a GPU machine (scripts/gpu_e2e.sh): `python -m scripts.gpu_e2e.NAME`."""
