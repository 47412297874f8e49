"""`python -m tests.bad_input`."""

import sys

from tests.bad_input.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
