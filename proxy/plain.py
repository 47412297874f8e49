"""Text from outside on its way into a log: one line stays one line, and no terminal obeys it."""

from __future__ import annotations

import re

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Controls (ANSI sequences begin with one), what some take for a line's end, lone surrogates."""


def printable(text: str) -> str:
    """The text with such characters as `\\uXXXX`, also valid where the text is JSON."""
    return _UNFIT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable_json(line: bytes) -> bytes:
    """The same for a line of JSON without its end; nearly always there is nothing to do."""
    if line.isascii() and b"\x7f" not in line:
        return line  # orjson has escaped what is below a blank
    return printable(line.decode()).encode()
