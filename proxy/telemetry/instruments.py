"""Counters and histograms at a tenth of prometheus_client's cost; its exposition shows them.

They are fed on the event loop alone and need no lock. A child per label values is a plain object,
kept by whoever feeds it often. Names, labels and buckets read as prometheus_client's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One counter under fixed label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count."""
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


class Counts(Collector):
    """A counter with labels; one without any can be fed directly."""

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
        """The family."""
        family = CounterMetricFamily(self._name, self._text, labels=self.label_names)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Spreads(Collector):
    """A histogram with labels; one without any can be fed directly."""

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
        """Drop every histogram that has this label value: what it names is gone."""
        for values in [values for values in self._children if value in values]:
            del self._children[values]

    def collect(self) -> Iterator[Metric]:
        """The family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in self._children.items():
            buckets, below = [], 0
            for name, count in zip(names, child.counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(values, buckets, child.total)
            if self._bounds[0] < 0:
                # Values below 0 make the sum no counter, so it is left out; the count is one.
                named = dict(zip(self.label_names, values, strict=True))
                family.add_sample(f"{self._name}_count", named, float(below))
        yield family
