"""`voltserve deploy` with the fake engine in place of the real one: `python -m tests.fakes.deploy FILE [FLAGS]`.

The first flag may be `--no-gateway` or `--gateway-only`.
"""

import sys
from pathlib import Path

from server.cluster.deploy import Wanted, deploy
from server.errors import UserError


def main() -> None:
    path, *flags = sys.argv[1:]
    wanted = Wanted(update="--gateway-only" not in flags, gateway="--no-gateway" not in flags)
    flags = [flag for flag in flags if flag not in {"--gateway-only", "--no-gateway"}]
    try:
        code = deploy(Path(path), flags, wanted, module="tests.fakes.engine")
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    raise SystemExit(code)


if __name__ == "__main__":
    main()
