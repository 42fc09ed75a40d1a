"""`voltserve serve` with the fake engine in place of the real one: `python -m tests.fakes.serve FLAGS`."""

import sys

from server.devices import Devices
from server.engines import load_configs
from server.errors import UserError
from server.serve import serve


def main() -> None:
    try:
        configs = load_configs(sys.argv[1:], devices=lambda: Devices((), "none on this test's machine"))
        code = serve(configs, module="tests.fakes.engine")
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    raise SystemExit(code)


if __name__ == "__main__":
    main()
