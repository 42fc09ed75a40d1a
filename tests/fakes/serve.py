"""`voltserve serve` with the fake engine in place of the real one: `python -m tests.fakes.serve FLAGS`."""

import sys

import typer

from server.cli.common import user_errors
from server.config.devices import Devices
from server.config.engines_file import load_configs
from server.run.serve import serve


def main() -> None:
    try:
        with user_errors(sys.argv[1:]):
            configs = load_configs(sys.argv[1:], devices=lambda: Devices((), "none on this test's machine"))
            code = serve(configs, module="tests.fakes.engine")
    except typer.Exit as end:
        code = end.exit_code
    raise SystemExit(code)


if __name__ == "__main__":
    main()
