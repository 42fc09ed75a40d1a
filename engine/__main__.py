"""`python -m engine <flags of vllm serve>`: sets the process up before any heavy import, then starts the server."""

import os
import sys

from engine import environment, process, progress


def main() -> None:
    """Serves until SIGTERM, or until the engine dies."""
    progress.phase("importing")
    process.become_launcher()
    if process.spans_machines(sys.argv):
        os.environ[environment.OVER_RAY] = "1"
    else:
        process.stay_on_loopback(os.environ)

    from engine import launcher

    launcher.run(sys.argv[1:])


if __name__ == "__main__":  # a spawned child imports this module too
    main()
