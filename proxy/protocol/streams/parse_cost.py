"""Bounds on the parse cost of a peer's bytes.

A parser in C has the interpreter until it is done. A byte that opens an array or object, ends a
name or separates two values costs 10 to 200 ns, and 60 to 300 bytes of memory.
"""

from __future__ import annotations

FREE_BYTES = 4096
MOST_OPENING, MOST_NAMES, MOST_VALUES = 1 << 13, 20_480, 1 << 18
"""Most `[` and `{`, `:` and `,`, also within texts. A list of the token ids of a long prompt, and
one of a thousand models, have fewer."""


def is_cheap(raw: bytes) -> bool:
    """Whether parsing a JSON text takes no more than some 5 ms, however it is made."""
    if len(raw) <= FREE_BYTES:
        return True
    if raw.count(b"[") + raw.count(b"{") > MOST_OPENING or raw.count(b":") > MOST_NAMES:
        return False
    return raw.count(b",") <= MOST_VALUES
