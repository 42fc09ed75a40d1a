"""`voltserve serve` with the fake engine in place of the real one: `python -m tests.fakes.serve FLAGS`."""

import sys

from server.config import load_config
from server.devices import Devices
from server.errors import UserError
from server.serve import serve


def main() -> None:
    try:
        config = load_config(sys.argv[1:], devices=lambda: Devices((), "none on this test's machine"))
        code = serve(config, module="tests.fakes.engine")
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    raise SystemExit(code)


if __name__ == "__main__":
    main()
