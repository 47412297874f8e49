"""The figures of docs/benchmarks/routing.md: a small JSON, made from runs, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from analysis.measures import grouped
from bench.cost.tables import Grid
from bench.routing.environments import RoutingError
from bench.routing.load import TRACE
from bench.routing.measured import Figures, Result
from bench.routing.report.verdict import TARGETS, Target, Verdict, verdicts
from bench.routing.systems import GAUGES, MODES, OURS, RIVALS

PAGE = Path("docs/benchmarks/routing.md")
FIGURES = PAGE.with_suffix(".json")
CHART = PAGE.with_suffix(".svg")
DEFAULT = f"{OURS} {GAUGES}"
"""This proxy as it is run where engines have vLLM's metrics."""
NAMES = {
    DEFAULT: "cache-proxy",
    "dynamo-kv": "Dynamo, KV router",
    "dynamo-kv-affinity": "Dynamo, session affinity",
    "sglang-router-cache": "SGLang router",
    "vllm-router-cache": "vLLM router",
}
"""The compared systems, as people know them."""
FEW_SEEDS = 3
"""As many have their numbers in a title."""
DIGITS = {"hit_ratio": 3, "tpot_p90_ms": 1, "makespan_s": 0}
"""Decimal places of a figure; 2 where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRatio:
    """A ratio of this proxy's figure to another run's, with its 90 % interval.

    `is_met` None: not judged. `together`: the ratio over the requests of all seeds, with its
    interval; empty: not known.
    """

    figure: str
    mode: str
    against: str
    at_most: float
    is_met: bool | None
    median: float
    low: float
    high: float
    together: list[float]

    @classmethod
    def of(cls, verdict: Verdict) -> PublishedRatio | None:
        """The ratio that a target was judged by; None: not measured."""
        ratio = verdict.ratio
        if ratio is None:
            return None
        return cls(
            figure=verdict.target.figure.name,
            mode=verdict.target.mode,
            against=verdict.against,
            at_most=verdict.target.limit,
            is_met=verdict.is_met,
            median=round(ratio.middle, 2),
            low=round(ratio.low, 2),
            high=round(ratio.high, 2),
            together=[round(value, 2) for value in ratio.together],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Systems on the same requests: one fleet at one load, medians over the seeds."""

    shape: str
    load: str
    seeds: list[int]
    speedups: list[float]
    trace: str
    commit: str
    machine: str
    command: str
    systems: dict[str, dict[str, float]]
    ratios: list[PublishedRatio]

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two comparisons the same one, made twice."""
        return self.shape, self.load, str(self.seeds), str(self.speedups), self.trace

    @property
    def is_whole(self) -> bool:
        """Whether every rival was measured."""
        return {DEFAULT, *RIVALS} <= self.systems.keys()

    @property
    def fleet(self) -> str:
        """The fleet in words, without the size of its KV."""
        return f"{self.shape.partition('x')[0]} engines"

    @property
    def title(self) -> str:
        """Fleet and load, and the clock's speed where it is no usual run."""
        usual = f"{self.fleet}, {self.load}"
        if self.is_whole:
            return usual
        speeds = " and ".join(f"{speed:g}" for speed in self.speedups)
        return f"{usual}, {_seeds(self.seeds)}, clock x{speeds}"


def comparisons(result: Result) -> list[Comparison]:
    """A comparison per fleet and load of a result."""
    made = verdicts(result)
    return [
        _comparison(result, shape, load, [v for v in made if (v.shape, v.load) == (shape, load)])
        for shape, load in result.cells()
    ]


def _comparison(result: Result, shape: str, load: str, made: Sequence[Verdict]) -> Comparison:
    groups = grouped(result.of(shape, load), lambda run: run.name)
    seeds = sorted({run.seed for runs in groups.values() for run in runs})
    known = {name: [one for run in runs if (one := run.figures)] for name, runs in groups.items()}
    return Comparison(
        shape=shape,
        load=load,
        seeds=seeds,
        speedups=[result.speedup],
        trace=result.trace,
        commit=result.commit,
        machine=result.machine,
        command=_command(result, shape, load, seeds),
        systems={name: _medians(figures) for name, figures in known.items() if figures},
        ratios=[ratio for verdict in made if (ratio := PublishedRatio.of(verdict))],
    )


def _command(result: Result, shape: str, load: str, seeds: Sequence[int]) -> str:
    """The command that makes the same runs, one system at a time."""
    runs = result.of(shape, load)
    systems = [name for name in (*RIVALS, OURS) if any(run.system == name for run in runs)]
    modes = [name for name in MODES if any(run.mode == name for run in runs)]
    options = "" if result.trace == TRACE.name else f"--trace {result.trace} "
    options += f"--shapes {shape} --loads {load} --systems {','.join(systems)}"
    options += f" --modes {','.join(modes)}" if modes else ""
    return (
        f'make bench-routing ROUTING="{options} --seeds {seeds[0]}-{seeds[-1]}'
        f' --speedup {result.speedup:g}"'
    )


def _medians(figures: Sequence[Figures]) -> dict[str, float]:
    found = asdict(Figures.middle(figures))
    took, found["tpot_p90_ms"] = found.pop("makespan_s"), found.pop("tpot_p90_s") * 1e3
    found |= {} if took is None else {"makespan_s": took}
    return {name: round(value, DIGITS.get(name, 2)) for name, value in found.items()}


def save(path: Path, made: Sequence[Comparison]) -> None:
    """Write comparisons as JSON, a line each."""
    lines = b",\n".join(map(orjson.dumps, made))
    path.write_bytes(b'{"comparisons": [\n' + lines + b"\n]}\n")


def read(paths: Sequence[Path]) -> list[Comparison]:
    """Read comparisons that `save` has written, and add those of the runs that `--out` has written.

    Runs of one trace and speedup are taken together, whatever file they are in; what they make
    takes the place of an earlier comparison of the same seeds. Raises OSError, and RoutingError
    for another file.
    """
    found: list[Comparison] = []
    results: dict[tuple[str, float], list[Result]] = {}
    for path in paths:
        rows = _saved(path)
        if rows is not None:
            found += rows
            continue
        result = Result.load(path)
        results.setdefault((result.trace, result.speedup), []).append(result)
    for group in results.values():
        found += comparisons(Result.merged(group))
    return list({one.key: one for one in found}.values())


def _saved(path: Path) -> list[Comparison] | None:
    """The comparisons of a file; None: it has none, but perhaps runs."""
    if path.suffix != ".json":
        return None
    try:
        told = orjson.loads(path.read_bytes())
        if "comparisons" not in told:
            return None
        return [
            Comparison(**row | {"ratios": [PublishedRatio(**one) for one in row["ratios"]]})
            for row in told["comparisons"]
        ]
    except (ValueError, TypeError, KeyError):
        raise RoutingError(f"{path}: must be what --out or --publish has written") from None


def tables(made: Sequence[Comparison]) -> list[Grid]:
    """The page's tables: seconds per system; ratios and targets; the same of other seeds."""
    whole = [one for one in made if one.is_whole]
    others = [one for one in made if not one.is_whole]
    found = [_seconds(made)]
    found += [_ratios("Beside every rival", whole)] if whole else []
    return [*found, _ratios("Other seeds and fleets", others)] if others else found


def _seconds(made: Sequence[Comparison]) -> Grid:
    """TTFT mean and p90 of every system that was measured."""
    rows = [
        [one.title, *(_pair(one.systems.get(name)) for name in NAMES)]
        for one in made
        if one.systems
    ]
    return Grid("TTFT mean / p90, s", ("TTFT mean / p90, s", *NAMES.values()), rows)


def _pair(figures: dict[str, float] | None) -> str:
    if figures is None or "ttft_p90_s" not in figures:
        return ""
    return f"{seconds(figures['ttft_mean_s'])} / {seconds(figures['ttft_p90_s'])}"


def seconds(value: float) -> str:
    """Three digits at least: 0.48, 13.9."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratios(title: str, made: Sequence[Comparison]) -> Grid:
    """A row per figure and target, a column per comparison; `missed` where the target is."""
    rows = [row for target in _asked(made) for row in _rows(target, made)]
    return Grid(title, ("figure", "target", *(one.title for one in made)), rows)


Asked = tuple[str, str, bool]
"""A figure, the mode, and whether it is beside this proxy's own default mode."""


def _asked(made: Sequence[Comparison]) -> list[Asked]:
    """What was asked of these comparisons, in the order of the targets."""
    wanted = dict.fromkeys(map(_asks, TARGETS))
    has = {_of(ratio) for one in made for ratio in one.ratios}
    return [one for one in wanted if one in has]


def _asks(target: Target) -> Asked:
    return target.figure.name, target.mode, target.against == DEFAULT


def _of(ratio: PublishedRatio) -> Asked:
    return ratio.figure, ratio.mode, ratio.against == DEFAULT


def _rows(asked: Asked, made: Sequence[Comparison]) -> Iterator[list[str]]:
    """The row of the seeds' medians, and that of all requests where it is known."""
    name, mode, beside_itself = asked
    label = f"{name}, `{mode}` to `{GAUGES}`" if beside_itself else name
    found = [next((r for r in one.ratios if _of(r) == asked), None) for one in made]
    yield [label, _limits(made, found), *map(_median, found)]
    if any(ratio and ratio.together for ratio in found):
        yield [f"{label}, all requests", "", *map(_all_requests, found)]


def _limits(made: Sequence[Comparison], found: Sequence[PublishedRatio | None]) -> str:
    """The limit, or one per load where loads differ in it."""
    pairs = zip(made, found, strict=True)
    by_load = {one.load: f"{ratio.at_most:g}" for one, ratio in pairs if ratio}
    if len(set(by_load.values())) < 2:
        return "".join(set(by_load.values()))
    return ", ".join(f"{load} {limit}" for load, limit in by_load.items())


def _median(ratio: PublishedRatio | None) -> str:
    if ratio is None:
        return ""
    missed = ", missed" if ratio.is_met is False else ""
    return _interval(ratio.median, ratio.low, ratio.high) + missed


def _all_requests(ratio: PublishedRatio | None) -> str:
    return _interval(*ratio.together) if ratio and ratio.together else ""


def _interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f}" + (f" ({low:.2f}–{high:.2f})" if low != high else "")


def _seeds(seeds: Sequence[int]) -> str:
    """The seeds, or how many where they are no short range."""
    if len(seeds) > FEW_SEEDS:
        return f"{len(seeds)} seeds"
    return f"seeds {seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


def markdown(made: Sequence[Comparison]) -> str:
    """The tables for the page."""
    return "\n\n".join(grid.markdown() for grid in tables(made))
