"""A reverse proxy for a fleet of vLLM instances that keeps sessions where their KV cache is."""

__version__ = "0.1.0"
"""The last release. A build writes its own version here (setup.py): to read it from the installed
package would load a megabyte of libraries."""


def described() -> str:
    """The text of `--version`: the version, and whether the core is compiled."""
    from proxy.core import is_compiled

    return f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})"
