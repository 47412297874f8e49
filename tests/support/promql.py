"""A part of PromQL, enough to evaluate the alerts and the boards without Prometheus.

Scrapes are kept as they came. Unlike Prometheus, `rate` and `increase` do not extrapolate to the
ends of their window, and an instant vector is the last scrape, however old.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
"""Values by labels, the metric's name not among them."""
Value = float | Vector
Window = dict[Labels, list[tuple[float, float]]]
"""Times and values by labels."""
_NAME = "__name__"
_TOKEN = re.compile(
    r'\s*(\d+(?:\.\d+)?(?![\w.])|\d+[smhd](?!\w)|[a-zA-Z_][\w:]*|"[^"]*"|[=!]~|[=!<>]=|[^\s\w])'
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEVELS = (("or",), ("and", "unless"), ("==", "!=", "<", ">", "<=", ">="), ("+", "-"), ("*", "/"))
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: (
        a / b if b else math.nan if not a or math.isnan(a) else math.copysign(math.inf, a)
    ),
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
}
_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
    "count": len,
}


def _increase(points: list[tuple[float, float]]) -> float:
    """How much a counter grew; one that fell has begun at 0 again."""
    values = [value for _, value in points]
    pairs = pairwise(values)
    return sum(after - before if after >= before else after for before, after in pairs)


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line through a gauge's values, by least squares."""
    middle_s = math.fsum(at_s for at_s, _ in points) / len(points)
    spread = math.fsum((at_s - middle_s) ** 2 for at_s, _ in points)
    return math.fsum((at_s - middle_s) * value for at_s, value in points) / spread


_OVER_TIME: dict[str, Callable[[list[tuple[float, float]]], float]] = {
    "rate": lambda points: _increase(points) / (points[-1][0] - points[0][0]),
    "increase": _increase,
    "avg_over_time": lambda points: sum(value for _, value in points) / len(points),
    "min_over_time": lambda points: min(value for _, value in points),
    "max_over_time": lambda points: max(value for _, value in points),
    "deriv": _slope,
}
_NEEDS_TWO = {"rate", "increase", "deriv"}


class Scrapes:
    """What Prometheus would have read, in the order of time."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, dict[Labels, float]]] = []

    def add(self, at_s: float, exposition: str, **target: str) -> None:
        """Add one scrape; `target`: the labels that Prometheus gives everything it reads there."""
        families = text_string_to_metric_families(exposition)
        rows = {
            frozenset({**s.labels, **target, _NAME: s.name}.items()): s.value
            for family in families
            for s in family.samples
        }
        if self._rows and self._rows[-1][0] == at_s:
            self._rows[-1][1].update(rows)
        else:
            self._rows.append((at_s, rows))

    def instant(self, wanted: Callable[[Mapping[str, str]], bool]) -> Vector:
        """The last value of each series."""
        last = self._rows[-1][1] if self._rows else {}
        return {_nameless(labels): value for labels, value in last.items() if wanted(dict(labels))}

    def window(self, wanted: Callable[[Mapping[str, str]], bool], seconds: float) -> Window:
        """The values of each series in the last `seconds`."""
        found: Window = {}
        since_s = self.now_s - seconds
        for at_s, rows in self._rows:
            for labels, value in rows.items() if at_s >= since_s else ():
                if wanted(dict(labels)):
                    found.setdefault(_nameless(labels), []).append((at_s, value))
        return found

    @property
    def now_s(self) -> float:
        """Time of the last scrape."""
        return self._rows[-1][0] if self._rows else 0.0

    def value(self, expression: str) -> Value:
        """The value of an expression at the last scrape."""
        return _Evaluation(self, expression).run()

    def vector(self, expression: str) -> dict[str, float]:
        """The same for a vector, its labels as text: `a=1,b=2`."""
        value = self.value(expression)
        assert isinstance(value, dict), value
        return {",".join(f"{k}={v}" for k, v in sorted(row)): x for row, x in value.items()}


def as_drawn(expression: str) -> str:
    """A panel's expression as Grafana sends it: of all instances, in a window of five minutes."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m"))


def _nameless(labels: Iterable[tuple[str, str]]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != _NAME)


def _kept(labels: Labels, names: set[str], *, without: bool) -> Labels:
    return frozenset(pair for pair in labels if (pair[0] in names) is not without)


class _Evaluation:
    """One expression, evaluated while it is read."""

    def __init__(self, scrapes: Scrapes, expression: str) -> None:
        self._scrapes, self._expression = scrapes, expression
        self._tokens: list[str] = []
        at = 0
        while found := _TOKEN.match(expression, at):
            self._tokens.append(found[1])
            at = found.end()
        assert not expression[at:].strip(), f"not understood: {expression[at:]}"

    def run(self) -> Value:
        value = self._binary(0)
        assert not self._tokens, f"{self._tokens} is left over of {self._expression}"
        return value

    def _next(self, *wanted: str) -> str:
        assert self._tokens, f"{self._expression} ends too soon"
        token = self._tokens.pop(0)
        assert not wanted or token in wanted, f"{token} for {wanted} in {self._expression}"
        return token

    def _is(self, *wanted: str) -> bool:
        if self._tokens and self._tokens[0] in wanted:
            self._tokens.pop(0)
            return True
        return False

    def _binary(self, level: int) -> Value:
        if level == len(_LEVELS):
            return self._operand()
        left = self._binary(level + 1)
        while self._tokens and self._tokens[0] in _LEVELS[level]:
            operator = self._next()
            on = self._names() if self._is("on") else None
            left = self._combined(operator, left, self._binary(level + 1), on)
        return left

    def _combined(self, operator: str, a: Value, b: Value, on: set[str] | None) -> Value:
        if operator in ("and", "or", "unless"):
            assert isinstance(a, dict), f"{operator} is between vectors: {self._expression}"
            assert isinstance(b, dict), f"{operator} is between vectors: {self._expression}"
            return _of_sets(operator, a, b, on)
        if isinstance(a, dict) and isinstance(b, dict):
            there = {_matched(labels, on): value for labels, value in b.items()}
            assert len(there) == len(b), f"many to many: {self._expression}"
            pairs = {
                _matched(labels, on) if operator in _ARITHMETIC else labels: (value, other)
                for labels, value in a.items()
                if (other := there.get(_matched(labels, on))) is not None
            }
            return _each(operator, pairs, kept=0)
        if isinstance(a, dict):
            assert isinstance(b, float)
            return _each(operator, {labels: (value, b) for labels, value in a.items()}, kept=0)
        if isinstance(b, dict):
            return _each(operator, {labels: (a, value) for labels, value in b.items()}, kept=1)
        assert operator in _ARITHMETIC, f"two numbers are compared: {self._expression}"
        return _ARITHMETIC[operator](a, b)

    def _operand(self) -> Value:
        token = self._next()
        if token == "(":
            value = self._binary(0)
            self._next(")")
            return value
        if token[0].isdigit():
            return float(token)
        if token in _AGGREGATIONS:
            return self._aggregated(_AGGREGATIONS[token])
        if self._tokens[:1] == ["("]:
            return self._called(token)
        return self._scrapes.instant(self._selector(token))

    def _names(self) -> set[str]:
        self._next("(")
        names = set()
        while not self._is(")"):
            names.add(self._next())
            self._is(",")
        return names

    def _aggregated(self, combine: Callable[[list[float]], float]) -> Vector:
        names: set[str] = set()
        without = False
        if self._tokens[0] in ("by", "without"):
            without = self._next() == "without"
            names = self._names()
        self._next("(")
        vector = self._binary(0)
        self._next(")")
        assert isinstance(vector, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(_kept(labels, names, without=without), []).append(value)
        return {labels: float(combine(values)) for labels, values in groups.items()}

    def _called(self, name: str) -> Value:
        self._next("(")
        if name in _OVER_TIME:
            wanted = self._selector(self._next())
            self._next("[")
            length = self._next()
            self._next("]")
            self._next(")")
            window = self._scrapes.window(wanted, float(length[:-1]) * _UNITS_S[length[-1]])
            least = 2 if name in _NEEDS_TWO else 1
            over_time = _OVER_TIME[name]
            return {k: over_time(points) for k, points in window.items() if len(points) >= least}
        arguments = []
        while not self._is(")"):
            arguments.append(self._binary(0))
            self._is(",")
        return self._function(name, arguments)

    def _function(self, name: str, arguments: list[Value]) -> Value:
        match name, arguments:
            case "time", []:
                return self._scrapes.now_s
            case "vector", [float(number)]:
                return {frozenset(): number}
            case "scalar", [dict(vector)]:
                return next(iter(vector.values())) if len(vector) == 1 else math.nan
            case "absent", [dict(vector)]:
                return {} if vector else {frozenset(): 1.0}
            case "histogram_quantile", [float(quantile), dict(vector)]:
                return _quantiles(quantile, vector)
            case _:
                raise AssertionError(f"{name} of {arguments} is not known: {self._expression}")

    def _selector(self, name: str) -> Callable[[Mapping[str, str]], bool]:
        wanted: list[tuple[str, Callable[[str, str], bool], str]] = [(_NAME, _MATCHES["="], name)]
        if self._is("{"):
            while not self._is("}"):
                label, operator = self._next(), self._next(*_MATCHES)
                wanted.append((label, _MATCHES[operator], self._next().strip('"')))
                self._is(",")
        return lambda row: all(is_equal(row.get(label, ""), to) for label, is_equal, to in wanted)


def _matched(labels: Labels, on: set[str] | None) -> Labels:
    return labels if on is None else _kept(labels, on, without=False)


def _of_sets(operator: str, a: Vector, b: Vector, on: set[str] | None) -> Vector:
    there = {_matched(labels, on) for labels in b}
    if operator == "or":
        here = {_matched(labels, on) for labels in a}
        return a | {labels: x for labels, x in b.items() if _matched(labels, on) not in here}
    is_kept = operator == "and"
    return {labels: x for labels, x in a.items() if (_matched(labels, on) in there) is is_kept}


def _each(operator: str, pairs: Mapping[Labels, tuple[float, float]], *, kept: int) -> Vector:
    """An operator on each pair; of a comparison the pairs for which it holds, of each one side."""
    if operator in _ARITHMETIC:
        compute = _ARITHMETIC[operator]
        return {labels: compute(*pair) for labels, pair in pairs.items()}
    holds = _COMPARISONS[operator]
    return {labels: pair[kept] for labels, pair in pairs.items() if holds(*pair)}


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """As Prometheus does, linear within a bucket."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(_kept(labels, {"le"}, without=True), []).append((bound, count))
    return {labels: _quantile(quantile, sorted(rows)) for labels, rows in groups.items()}


def _quantile(quantile: float, rows: list[tuple[float, float]]) -> float:
    rank = quantile * rows[-1][1]
    if not rank:
        return math.nan
    low, below = 0.0, 0.0
    for bound, count in rows:
        if count >= rank:
            return (
                low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            )
        low, below = bound, count
    return math.nan
