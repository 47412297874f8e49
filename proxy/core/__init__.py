"""The decisions: values and `now_s` in, values out; no IO, no clock, no random. Compiled to C."""


def is_compiled() -> bool:
    """Whether the core runs as C; if not, its files are interpreted."""
    from proxy.core import types

    return not types.__file__.endswith(".py")
