"""`python -m bench.routing`."""

import sys

from bench.routing.cli import main

sys.exit(main())
