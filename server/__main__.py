"""`python -m server FLAGS`, the container's entry point: the same as `voltserve serve FLAGS`."""

import sys

from server.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
