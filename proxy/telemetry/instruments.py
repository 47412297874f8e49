"""Counters and histograms at a tenth of prometheus_client's cost, for its exposition.

Only the event loop writes to them, so they need no lock. Each combination of label values is an
object of its own, which frequent users keep. Names, labels and buckets look like
prometheus_client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One counter under fixed label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount


class Spread:
    """One histogram under fixed label values."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value in its bucket."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Levels(Collector):
    """A gauge with one label, read as a whole at each scrape by `read`."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name, self._text, self._label = name, text, label
        self.read: Callable[[], Mapping[str, float]] = dict

    def collect(self) -> Iterator[Metric]:
        """The metric family."""
        family = GaugeMetricFamily(self._name, self._text, labels=(self._label,))
        for value, level in self.read().items():
            family.add_metric([value], level)
        yield family


class Counts(Collector):
    """A counter with labels; without labels `inc` can be called on it directly."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self.label_names = name, text, tuple(labels)
        self._children: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.inc = self.labels().inc

    def labels(self, *values: str) -> Count:
        """The counter of these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[tuple(map(str, values))] = Count()
        return child

    def collect(self) -> Iterator[Metric]:
        """The metric family."""
        family = CounterMetricFamily(self._name, self._text, labels=self.label_names)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Spreads(Collector):
    """A histogram with labels; without labels `observe` can be called on it directly."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self.label_names = name, text, tuple(labels)
        self._bounds = tuple(float(bound) for bound in buckets)
        self._children: dict[tuple[str, ...], Spread] = {}
        if not labels:
            self.observe = self.labels().observe

    def labels(self, *values: str) -> Spread:
        """The histogram of these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[tuple(map(str, values))] = Spread(self._bounds)
        return child

    def forget(self, value: str) -> None:
        """Drop every histogram with this label value, for example of a removed instance."""
        for values in [values for values in self._children if value in values]:
            del self._children[values]

    def collect(self) -> Iterator[Metric]:
        """The metric family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in self._children.items():
            buckets, below = [], 0
            for name, count in zip(names, child.counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(values, buckets, child.total)
            if self._bounds[0] < 0:
                # With values below 0 the sum is not monotonic, so it is left out.
                named = dict(zip(self.label_names, values, strict=True))
                family.add_sample(f"{self._name}_count", named, float(below))
        yield family
