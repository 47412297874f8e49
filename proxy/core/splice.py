"""Change a few top-level fields of a JSON object without touching any other byte.

Big integers, float spelling, key order and escapes of everything else survive, which a parse and
re-serialisation would not promise. The caller has parsed the body before: it is a valid object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^][{}"]*+\]|[][{},]', re.DOTALL)
"""Strings, arrays without strings or nesting (token ids: thousands of them), single marks."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_SHORT = dict(zip("bfnrt", "\b\f\n\r\t", strict=True))
_OPEN, _CLOSE = frozenset(b"{["), frozenset(b"}]")


def members(body: bytes) -> Iterator[tuple[str, int, int]]:
    """Top-level members as (key, start of the key, end of the value)."""
    depth, key, start = 0, b"", -1
    for token in _TOKEN.finditer(body):
        kind, last = body[token.start()], body[token.end() - 1]
        depth += (kind in _OPEN) - (last in _CLOSE)
        if start < 0 and depth == 1 and kind == ord('"'):
            key, start = token.group(), token.start()
        elif start >= 0 and (depth == 0 or (depth == 1 and kind == ord(","))):
            yield _unescape(key[1:-1]), start, token.start()
            start = -1


def _unescape(key: bytes) -> str:
    """A key as the engine will read it: `\\u006bv` is `kv`."""

    def plain(match: re.Match[str]) -> str:
        code, short = match.groups()
        return chr(int(code, 16)) if code else _SHORT.get(short, short)

    name = key.decode()
    if "\\" not in name:
        return name
    return _ESCAPE.sub(plain, name).encode("utf-16", "surrogatepass").decode("utf-16")


def splice(body: bytes, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """Remove the members named in `drop` and `put`, then append those of `put` (JSON values)."""
    gone = {*drop, *put}
    kept = [body[start:end].rstrip() for key, start, end in members(body) if key not in gone]
    added = [b'"%s":%s' % (key.encode(), value) for key, value in put.items()]
    return b"{" + b",".join(kept + added) + b"}"
