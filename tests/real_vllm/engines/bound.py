"""Run a command that ends with whoever started it: `bound.py COMMAND ARGUMENT...`.

Tests stop their engines themselves; this is for a test run that is killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
