"""`python -m bench.cost`."""

import sys

from bench.cost.cli import main

sys.exit(main())
