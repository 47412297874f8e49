"""A reverse proxy for a fleet of vLLM instances that keeps sessions where their KV cache is."""

__version__ = "0.1.0"
"""A constant, since reading the version from the installed package would load a megabyte of
libraries."""


def described() -> str:
    """The text of `--version`: the version, and whether the core is compiled."""
    from proxy.core import is_compiled

    return f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})"
