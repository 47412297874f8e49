"""The two tables of a run, every peer's figures and the targets: for a terminal, for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from bench.cost.result import Result
from bench.cost.targets import MB, Verdict, verdicts
from bench.measuring.window import Window

Cell = Callable[[Sequence[Window]], str]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table without its looks."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As a Markdown table."""
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left")
        for i, header in enumerate(self.headers):
            is_name = i == 0
            table.add_column(header, justify="left" if is_name else "right", no_wrap=is_name)
        for row in self.rows:
            table.add_row(*row)
        return table


def grids(result: Result) -> list[Grid]:
    """Both tables."""
    return [figures(result), targets(result)]


def figures(result: Result) -> Grid:
    """Medians over the rounds, the CPU's with its range; `n`: no window was calm."""
    rows = []
    for peer, version in result.versions.items():
        cells = [cell(result.of(peer, scenario)) for _, scenario, cell in COLUMNS]
        rows.append([f"{peer} {version}".strip(), *cells])
    headers = ["peer", *(header for header, _, _ in COLUMNS)]
    title = f"CPU and latency, medians of {result.rounds} rounds, {result.machine}"
    return Grid(title, headers, rows)


def _cpu_us(windows: Sequence[Window]) -> str:
    values = [w.cpu_per_unit_s * 1e6 for w in windows if w.cpu_per_unit_s is not None]
    if not values:
        return ""
    spread = "" if len(values) == 1 else f" ({number(min(values))}–{number(max(values))})"
    return number(median(values)) + spread + _noisy(windows)


def _ms(*values: Callable[[Window], float | None]) -> Cell:
    def cell(windows: Sequence[Window]) -> str:
        middles = [_median(value(w) for w in windows) for value in values]
        found = [f"{middle * 1e3:.2f}" for middle in middles if middle is not None]
        return " / ".join(found) + (_noisy(windows) if found else "")

    return cell


def _pss_mb(windows: Sequence[Window]) -> str:
    middle = _median(w.pss_bytes for w in windows)
    return "" if middle is None else number(middle / MB)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _noisy(windows: Sequence[Window]) -> str:
    return " n" if all(w.is_noisy for w in windows) else ""


COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("plain-c32 µs/request", "plain-c32", _cpu_us),
    ("ttft-c1 µs/request", "ttft-c1", _cpu_us),
    ("TTFT p50 ms", "ttft-c1", _ms(lambda w: w.ttft_p50_s)),
    ("paced-c512 µs/event", "paced-c512", _cpu_us),
    ("lag p50 / p99 ms", "paced-c512", _ms(lambda w: w.lag_p50_s, lambda w: w.lag_p99_s)),
    ("PSS MB", "paced-c512", _pss_mb),
    ("body400k-c8 µs/request", "body400k-c8", _cpu_us),
    ("giant lag p50 / p99 ms", "giant", _ms(lambda w: w.lag_p50_s, lambda w: w.lag_p99_s)),
    ("nested lag p50 / p99 ms", "nested", _ms(lambda w: w.lag_p50_s, lambda w: w.lag_p99_s)),
)


def targets(result: Result) -> Grid:
    """What is asked for, what was measured, and whether that meets it."""
    rows = [_target_row(verdict) for verdict in verdicts(result)]
    headers = ["figure", "relative to", "median (range)", "n", "at most", "met"]
    return Grid("Targets", headers, rows)


def _target_row(verdict: Verdict) -> list[str]:
    target, samples = verdict.target, verdict.samples
    met = {True: "yes", False: "no", None: "not measured"}[verdict.is_met]
    return [
        f"{target.number}. {target.what}",
        samples.against,
        _figure(verdict),
        str(len(samples.values)) + (" n" if samples.is_noisy and samples.values else ""),
        f"{target.limit:g} {target.unit}".strip(),
        met,
    ]


def _figure(verdict: Verdict) -> str:
    values, unit = verdict.samples.values, verdict.target.unit
    if verdict.middle is None:
        return ""
    spread = "" if len(values) == 1 else f" ({number(min(values))}–{number(max(values))})"
    return f"{number(verdict.middle)} {unit}".strip() + spread


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def markdown(result: Result) -> str:
    """Both tables and what they stand on, for a document."""
    head = (
        f"{result.machine}, medians of {result.rounds} paired rounds;"
        " in brackets the range; `n`: other work ran in every window; empty: no window counts."
    )
    return "\n\n".join([head, *(grid.markdown() for grid in grids(result))])
