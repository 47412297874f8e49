"""A reverse proxy for a fleet of vLLM instances that keeps sessions where their KV cache is."""

__version__ = "0.1.0"
"""A constant: to ask the installation for it would load a megabyte of libraries for good."""


def described() -> str:
    """What `--version` says: the version, and whether the decisions are compiled."""
    from proxy.core import is_compiled

    return f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})"
