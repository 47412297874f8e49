"""`python -m tests.routing`."""

import sys

from tests.routing.cli import main

sys.exit(main())
