"""No regular expression of the proxy takes a time that grows faster than the text it is held to.

Peers choose texts. A pattern that tries each part of a long run anew takes seconds for a megabyte,
in one call that nothing interrupts. So each pattern gets runs of what each of its repetitions
takes, behind what it expects before it, and never what it expects after it.
"""

from __future__ import annotations

import collections
import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import proxy

SIZE = 1 << 15
"""Characters of a run: a step for each pair of them would take seconds."""
MOST_S = 0.02
"""CPU time of one call, of three the shortest: a few steps for each character take under 1 ms."""
TRIES = 3
TRIED = "a0A_-. \t\n,;:=\"'\\/(){}[]<>@#%+?\0\x80é"
REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)


def patterns() -> dict[str, re.Pattern[Any]]:
    found: dict[str, re.Pattern[Any]] = {}
    for module in pkgutil.walk_packages(proxy.__path__, "proxy."):
        if not module.name.endswith("__main__"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern) and value not in found.values():
                    found[f"{module.name}.{name}"] = value
    return found


PATTERNS = patterns()
SOURCES = [path.read_text("utf-8") for path in Path(proxy.__path__[0]).rglob("*.py")]


def uses(name: str) -> list[str]:
    """The methods of a pattern that the proxy calls: a search begins anew at each character."""
    called = rf"\b{name.rpartition('.')[2]}\.(match|search|fullmatch|sub|findall|finditer|split)\b"
    return sorted({found for source in SOURCES for found in re.findall(called, source)})


def takes(element: tuple[Any, Any], char: str) -> bool:
    """Whether an element of one character takes this one."""
    (kind, value), code = element, ord(char)
    if kind is op.IN:
        is_negated = value[0][0] is op.NEGATE
        return is_negated != any(takes(item, char) for item in value[is_negated:])
    if kind is op.CATEGORY:
        is_not = "NOT" in str(value)
        is_in = {"DIG": char.isdigit(), "SPA": char.isspace(), "WOR": char.isalnum() or char == "_"}
        return is_not != next(one for name, one in is_in.items() if name in str(value))
    if kind is op.RANGE:
        return bool(value[0] <= code <= value[1])
    if kind is op.ANY:
        return char != "\n"
    return bool(code == value) == (kind is op.LITERAL)


def samples(parts: Any, marks: list[str], most: int = 2) -> list[str]:
    """Texts that the parts of a pattern take, of `marks` and of any other characters."""
    found = [""]
    for kind, value in parts:
        one = [""]
        if kind is op.LITERAL:
            one = [chr(value)]
        elif kind in (op.IN, op.NOT_LITERAL, op.ANY):
            own = [char for char in marks if takes((kind, value), char)][:most]
            one = own + [char for char in TRIED if takes((kind, value), char)][:most]
        elif kind is op.BRANCH:
            one = [text for branch in value[1] for text in samples(branch, marks, most)]
        elif kind in REPEATS:
            one = [text * max(1, value[0]) for text in samples(value[2], marks, most)]
        elif kind in (op.SUBPATTERN, op.ATOMIC_GROUP):
            one = samples(value[-1] if kind is op.SUBPATTERN else value, marks, most)
        found = [begin + text for begin in found for text in one][: 8 * most]
    return found


def runs(parts: Any, marks: list[str], before: str = "") -> Iterator[tuple[str, str]]:
    """Each repetition without a bound: what it takes, and what stands before it."""
    for at, (kind, value) in enumerate(parts):
        begin = before + samples(parts[:at], marks, 1)[0]
        if kind in REPEATS:
            if value[1] is op.MAXREPEAT:
                yield from ((begin, text) for text in samples(value[2], marks) if text)
            yield from runs(value[2], marks, begin)
        elif kind is op.SUBPATTERN:
            yield from runs(value[-1], marks, begin)
        elif kind is op.ATOMIC_GROUP:
            yield from runs(value, marks, begin)
        elif kind is op.BRANCH:
            for branch in value[1]:
                yield from runs(branch, marks, begin)


def calls(name: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every use of a pattern on every run, with what is tried."""
    pattern, used = PATTERNS[name], uses(name) or ["match"]
    tree = _parser.parse(pattern.pattern, pattern.flags)
    said_of = re.findall(r"LITERAL, (\d+)", repr(tree.data).replace("NOT_LITERAL", "LITERAL"))
    marks = sorted({chr(int(code)) for code in said_of if not chr(int(code)).isalnum()})
    for before, text in runs(tree, marks):
        run = text * (SIZE // len(text))
        for tried in (before + run, before + run + "\0", (before + text) * (SIZE // 8)):
            said: Any = tried.encode("latin-1") if isinstance(pattern.pattern, bytes) else tried
            for use in used:
                yield f"{use} of {before!r}, then {text!r}", partial(called, pattern, use, said)


def called(pattern: re.Pattern[Any], use: str, text: Any) -> None:
    told = getattr(pattern, use)(*[text[:0]] * (use == "sub"), text)
    collections.deque(told if use == "finditer" else (), maxlen=0)


def cpu_s(call: Callable[[], None]) -> float:
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_no_pattern_tries_a_run_again_and_again(name: str) -> None:
    for what, call in calls(name):
        assert any(cpu_s(call) < MOST_S for _ in range(TRIES)), what
