"""`python -m server.cluster.on_ray.watch`: the directory's content for a gateway, one line of JSON every second.

A separate process: Ray's own code ends its process when the head is gone, and the gateway must survive that.
"""

import sys
import time

import ray
from ray import serve

from server.cluster.layout import DIRECTORY
from server.cluster.on_ray.connect import connect, own_output

INTERVAL = 1.0  # seconds
ANSWER_LIMIT = 5.0  # seconds


def main() -> None:
    """Runs until nobody reads what it writes, or the directory cannot be asked."""
    say = own_output()
    connect()
    try:
        handle = serve.get_deployment_handle("directory", DIRECTORY)
        while True:
            say(handle.look.remote().result(timeout_s=ANSWER_LIMIT))
            time.sleep(INTERVAL)
    except BrokenPipeError:
        pass
    except (ray.exceptions.RayError, serve.exceptions.RayServeException, KeyError, TimeoutError) as error:
        print(f"the directory does not answer: {type(error).__name__} {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
