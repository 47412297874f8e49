"""Other differences between two runs, which make their comparison invalid.

A pair is compared to learn what one change does: another policy, another proxy. Where more differs
the comparison is refused, unless the user names it (`--allow`). What a run does not tell, as older
ones, does not count.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from analysis.report.verdict import knew

Summary = Mapping[str, Any]
KINDS = ("text", "trace", "seed", "pace", "settings", "model", "engines", "end")
"""The names by which a difference can be allowed."""


def confounders(
    a: Summary, b: Summary, names: tuple[str, str] = ("A", "B")
) -> dict[str, list[str]]:
    """Return what differs between two runs that should not, in words, by its kind."""
    found: dict[str, list[str]] = {}
    for name, summary in zip(names, (a, b), strict=True):
        if text := knew(summary):
            found.setdefault("text", []).append(f"{name}: {text}")
        if summary.get("stopped") or summary.get("interrupted"):
            found.setdefault("end", []).append(f"{name}: ended before its time")
    for kind, told in _differences(a, b):
        found.setdefault(kind, []).append(told)
    return found


def _differences(a: Summary, b: Summary) -> Iterator[tuple[str, str]]:
    yield from _trace(a, b)
    yield from _seed(a, b)
    for name in ("mode", "concurrency"):
        yield from _differs("pace", name, a.get(name), b.get(name))
    yield from _differs("pace", "speedup for the target", _speedup(a), _speedup(b))
    mine, other = a.get("settings") or {}, b.get("settings") or {}
    for name in sorted(mine.keys() & other.keys()):
        yield from _differs("settings", name, mine[name], other[name], is_told=True)
    yield from _differs("model", "model", a.get("model"), b.get("model"))
    yield from _differs("engines", "engines", *_engines(a, b))


def _differs(
    kind: str, name: str, mine: Any, other: Any, *, is_told: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield a difference; None is unknown, unless both runs have told the value."""
    known = is_told or (mine is not None and other is not None)
    if known and mine != other:
        yield kind, f"{name} {_shown(mine)} and {_shown(other)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trace(a: Summary, b: Summary) -> Iterator[tuple[str, str]]:
    """Compare what was planned, by its digest; of older runs only its name is known."""
    mine, other = a.get("plan_digest"), b.get("plan_digest")
    names = [str(one.get("trace")).rpartition("/")[2] for one in (a, b)]
    if mine is not None and other is not None:
        if mine != other:
            counts = f"{a.get('planned')} and {b.get('planned')} requests"
            yield "trace", f"not the same requests ({counts} of {names[0]} and {names[1]})"
    elif names[0] != names[1]:
        yield "trace", f"trace {names[0]} and {names[1]}"


def _seed(a: Summary, b: Summary) -> Iterator[tuple[str, str]]:
    """Compare how the words were chosen; two runs with new words each are alike."""
    given = [one.get("seed_is_given") for one in (a, b)]
    if None in given or given == [False, False]:
        return
    told = [f"--seed {one.get('seed')}" if one["seed_is_given"] else "new words" for one in (a, b)]
    if told[0] != told[1]:
        yield "seed", f"{told[0]} and {told[1]}"


def has_same_text(a: Summary, b: Summary) -> bool:
    """Whether two runs sent the same words, as far as is known."""
    mine, other = a.get("seed"), b.get("seed")
    if a.get("seed_is_given") is False or b.get("seed_is_given") is False:
        return False
    return mine is None or other is None or mine == other


def _speedup(summary: Summary) -> float | None:
    """Return the pace in the target's own time."""
    speedup = summary.get("speedup")
    return None if speedup is None else round(speedup / (summary.get("time_scale") or 1.0), 9)


def _engines(a: Summary, b: Summary) -> tuple[str | None, str | None]:
    """Return the engines' number, and the sizes of their KV where both runs know them."""
    caches = [one.get("engine_cache") or {} for one in (a, b)]
    numbers = [len(one.get("engines") or ()) for one in caches]
    if not all(numbers):
        return None, None
    sizes = [sorted((one.get("layouts") or {}).values()) for one in caches]
    if any(len(one) != number for one, number in zip(sizes, numbers, strict=True)):
        sizes = [[], []]
    told = [
        f"{number} ({', '.join(dict.fromkeys(one))})" if one else str(number)
        for number, one in zip(numbers, sizes, strict=True)
    ]
    if told[0] == told[1] and sizes[0] != sizes[1]:
        told = [f"{number} ({', '.join(one)})" for number, one in zip(numbers, sizes, strict=True)]
    return told[0], told[1]
