"""Bounds on the parse cost of a peer's bytes.

A parser in C has the interpreter until it is done. Each value is an object that is made and freed
again: a number takes 65 ns, a text 100 to 200, an array or object 130 to 300, a name 150 to 200.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from typing import Any, Final

FREE_BYTES = 4096
MOST_NS: Final = 6_000_000
"""Most estimated time. A list of a thousand models has 5,300,000."""
BYTE_NS: Final = 1
MARKS_NS: Final = ((b",", 65), (b'"', 30), (b":", 80), (b"[", 150), (b"{", 150))
"""For each of these bytes, also within texts: it comes with a value, is half of what makes a text,
ends a name, or opens an array or object."""
_FEW: Final = 8
"""A list of numbers has no more of the other marks."""
MAX_DEPTH: Final = 128
"""Most levels of arrays and objects: beyond some 1,000 to compare or write them is an error."""
_MANY: Final = 1 << 16
"""From this many values in one level on (token ids as a rule), counting brackets is cheaper than
visiting the values."""
_BYTES_PER_FIND: Final = 128
"""To find a byte anew takes as long as `bytes.count` takes for so many."""
_is_nest = frozenset({dict, list}).__contains__


def is_cheap(raw: bytes) -> bool:
    """Whether parsing a JSON text takes no more than some 5 ms, however it is made."""
    size = len(raw)
    return size <= FREE_BYTES or parse_ns(raw) <= MOST_NS


def parse_ns(raw: bytes) -> int:
    """The estimated time to parse a JSON text and to free its values.

    Where it is beyond MOST_NS, it may be more than what is told.
    """
    total = BYTE_NS * len(raw)
    for mark, each_ns in MARKS_NS:
        if total > MOST_NS:
            break
        total += each_ns * marks(raw, mark, _FEW)
    return total


def marks(raw: bytes, mark: bytes, one_by_one: int) -> int:
    """How often a byte is there.

    The first ones, `one_by_one` at most, are found one by one: where there are few, as in texts,
    that takes a twentieth of the time of `bytes.count`. Where there are many it takes as long at
    most.
    """
    at, found = -1, 0
    for _ in range(min(one_by_one, len(raw) // _BYTES_PER_FIND)):
        at = raw.find(mark, at + 1)
        if at < 0:
            return found
        found += 1
    return found + raw.count(mark, at + 1)


def has_brackets(raw: bytes) -> bool:
    """Whether there are enough brackets for MAX_DEPTH; for large bodies `is_deep` is cheaper."""
    return marks(raw, b"[", MAX_DEPTH) + marks(raw, b"{", MAX_DEPTH) > MAX_DEPTH


def is_deep(body: Mapping[str, Any], raw: bytes) -> bool:
    """Whether arrays and objects are nested more than `MAX_DEPTH` deep.

    Level by level, without recursion and without a Python step per value.
    """
    objects: list[Any] = [body]
    arrays: list[Any] = []
    for _ in range(MAX_DEPTH):
        if sum(map(len, arrays)) > _MANY and not has_brackets(raw):
            return False
        values = list(chain.from_iterable(map(dict.values, objects)))
        values += chain.from_iterable(arrays)
        below = list(compress(values, map(_is_nest, map(type, values))))
        if not below:
            return False
        objects = [x for x in below if type(x) is dict]
        arrays = [x for x in below if type(x) is list] if len(objects) < len(below) else []
    return True
