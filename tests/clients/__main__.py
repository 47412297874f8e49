"""`python -m tests.clients [arguments of pytest]`: agents, where only loopback can be reached.

Without npm, or where a process may not have a network of its own, it says so and ends with
status 0.
"""

from __future__ import annotations

import os
import sys

from tests.clients import namespace
from tests.clients.install import ROOT, prepared


def main() -> int:
    """Install, enter the network, become pytest."""
    status = prepared()
    if status is None:
        namespace.enter()
        os.chdir(ROOT)
        arguments = ["-m", "pytest", "-q", "tests/clients", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *arguments])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
