"""Times on a V100, computed from sm_70 machine code, stated costs and constants fitted on other GPUs."""
