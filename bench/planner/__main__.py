"""`python -m bench.planner`."""

import sys

from bench.planner.cli import main

sys.exit(main())
