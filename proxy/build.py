"""How this installation was built: its version, and whether its decisions are compiled."""

from __future__ import annotations

from proxy import __version__
from proxy.core import types


def is_compiled() -> bool:
    """Whether `proxy.core` runs as C (see setup.py); if not, its files are interpreted."""
    return not types.__file__.endswith(".py")


def described() -> str:
    """What `--version` says."""
    return f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})"
