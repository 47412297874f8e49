"""The reverse proxy's shell: IO, one file per outside thing; decisions live in `proxy.core`."""

__version__ = "0.1.0"
"""Kept here: to ask the installation for it would load a megabyte of libraries for good."""
