"""The names of voltserve's environment variables that are no flags of `serve`, and of flags that others read too.

Every flag of `serve` is also a variable: `server.config.settings.variable_name` makes its name. Engine processes read
their names in `engine`, which imports nothing from here.
"""

PREFIX = "VOLTSERVE_"

# Read by commands that ask a running server.
API_KEY = f"{PREFIX}API_KEY"

# Flags of `serve` that are needed before its settings are read, or by other commands.
KEYS_FILE = f"{PREFIX}KEYS_FILE"
USAGE_FILE = f"{PREFIX}USAGE_FILE"
LOG_FORMAT = f"{PREFIX}LOG_FORMAT"

# Set for the engine's processes.
PROGRESS_SOCKET = f"{PREFIX}PROGRESS_SOCKET"  # where to send progress datagrams (engine/progress.py)
FORCE_VOLTA = f"{PREFIX}FORCE_VOLTA"  # treat other GPUs as V100s (engine/gpus.py)
SUPERVISOR = f"{PREFIX}ENGINE_SUPERVISOR"  # the process id that must be the parent (engine/process.py)
