"""The environment variables by which processes of voltserve talk to each other, and torch's that keeps steps eager.

The gateway spells the same names (server/config/render.py, server/supervisor/process.py), since neither side imports
the other. A test compares them.
"""

# 1: every visible GPU is treated as a V100. The gateway sets it for `--volta force`.
FORCE_VOLTA = "VOLTSERVE_FORCE_VOLTA"
# The Unix datagram socket that takes the engine's progress. The gateway sets it.
PROGRESS_SOCKET = "VOLTSERVE_PROGRESS_SOCKET"
# The supervisor's process id, so that the engine follows it. The supervisor sets it.
SUPERVISOR = "VOLTSERVE_ENGINE_SUPERVISOR"
# The launcher's process id, so that the engine's other processes follow it. The launcher sets it.
LAUNCHER = "VOLTSERVE_ENGINE_LAUNCHER"
# Set where Ray starts the workers, for the processes that start later. The launcher sets it.
OVER_RAY = "VOLTSERVE_ENGINE_OVER_RAY"
# 1: Dynamo does nothing, so no step is recorded. torch reads it; the gateway may set it.
NO_DYNAMO = "TORCH_COMPILE_DISABLE"
