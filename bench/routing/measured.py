"""What a run leaves: a line per answered request, and the figures that follow from them.

All times are engine time: the client's times multiplied by the speedup.
"""

from __future__ import annotations

import gzip
import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson

from analysis.measures import percentile
from bench.cost.result import machine_class
from bench.measuring.peers import ROOT
from bench.routing.environments import RoutingError

BUSY_LIMIT = 0.6
"""Above this share of the machine's CPU time the programs wait for a CPU, not for the engines."""


class Answered(NamedTuple):
    """One answered request; `tpot_s` is the time per output token after the first."""

    session: str
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run; times in seconds, ratios per prompt token."""

    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p90_s: float
    makespan_s: float | None

    @classmethod
    def of(cls, answered: Sequence[Answered], makespan_s: float | None) -> Figures | None:
        """The figures of these answers; None if there are none."""
        if not answered:
            return None
        ttft_s = sorted(one.ttft_s for one in answered)
        cached = sum(one.cached_tokens for one in answered)
        return cls(
            hit_ratio=cached / sum(one.prompt_tokens for one in answered),
            ttft_mean_s=math.fsum(ttft_s) / len(ttft_s),
            ttft_p50_s=percentile(ttft_s, 50),
            ttft_p90_s=percentile(ttft_s, 90),
            ttft_p99_s=percentile(ttft_s, 99),
            tpot_p90_s=percentile(sorted(one.tpot_s for one in answered), 90),
            makespan_s=makespan_s,
        )

    @classmethod
    def middle(cls, seeds: Sequence[Figures]) -> Figures:
        """The median of each figure; that of the makespan is of the runs that know it."""
        known = {
            one.name: [value for seed in seeds if (value := getattr(seed, one.name)) is not None]
            for one in fields(cls)
        }
        found: dict[str, Any] = {name: median(of) if of else None for name, of in known.items()}
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a system, or a bound that stands for one (`is_bound`).

    `mode` is empty where modes make no difference. `sent` counts the requests of the work, `lost`
    those without a whole answer. `makespan_s` None: not known. `busy_ratio`: the machine's CPU time
    in use; None: nothing ran.
    """

    shape: str
    load: str
    seed: int
    system: str
    mode: str = ""
    sent: int
    lost: int
    answered: tuple[Answered, ...]
    makespan_s: float | None
    busy_ratio: float | None = None
    is_bound: bool = False
    fault: str = ""

    @property
    def name(self) -> str:
        """System and mode."""
        return f"{self.system} {self.mode}".strip()

    @property
    def figures(self) -> Figures | None:
        """Its figures; None if nothing was answered."""
        return Figures.of(self.answered, self.makespan_s)


@dataclass(slots=True)
class Result:
    """All runs of a command, and what they were made with."""

    machine: str
    trace: str
    speedup: float
    ours: str
    runs: list[Run] = field(default_factory=list)
    commit: str = ""
    """The project's commit; empty: not known."""

    @classmethod
    def begin(cls, trace: str, speedup: float, ours: str) -> Result:
        """A result without runs, on this machine and commit."""
        return cls(machine_class(), trace, speedup, ours, commit=_commit())

    def of(self, shape: str, load: str) -> list[Run]:
        """The runs of a fleet at a load, without those that failed as a whole."""
        return [
            run for run in self.runs if (run.shape, run.load) == (shape, load) and not run.fault
        ]

    def cells(self) -> list[tuple[str, str]]:
        """Shapes with loads, as they first came."""
        return list(dict.fromkeys((run.shape, run.load) for run in self.runs))

    def save(self, path: Path) -> None:
        """Write it as JSON, gzipped where the name ends in .gz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = orjson.dumps(self, default=list)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result that was saved; raises OSError, and RoutingError for another file."""
        content = path.read_bytes()
        try:
            told: dict[str, Any] = orjson.loads(
                gzip.decompress(content) if path.suffix == ".gz" else content
            )
            runs = [
                Run(**run | {"answered": tuple(Answered(*one) for one in run["answered"])})
                for run in told.pop("runs")
            ]
            return cls(**told, runs=runs)
        except (ValueError, EOFError, gzip.BadGzipFile, KeyError, TypeError, AttributeError):
            raise RoutingError(f"{path}: must be what --out has written") from None

    @classmethod
    def merged(cls, results: Sequence[Result]) -> Result:
        """Several results as one; a run that is in several counts once, as the last has it."""
        whole = replace(results[-1], runs=[])
        runs = {
            (run.shape, run.load, run.seed, run.name): run
            for result in results
            for run in result.runs
        }
        whole.runs = list(runs.values())
        return whole


def _commit() -> str:
    """The commit of this clone, with a mark where files are changed; empty without git."""
    command = ("git", "describe", "--always", "--dirty")
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def answers(rows: Iterable[dict[str, Any]], speedup: float) -> tuple[Answered, ...]:
    """The whole answers among the rows of a replay; one that is too short is none."""
    return tuple(_answered(row, speedup) for row in rows if _is_whole(row))


def _is_whole(row: dict[str, Any]) -> bool:
    if row["outcome"] != "ok" or row["first_token_s"] is None:
        return False
    return bool((row["completion_tokens"] or 0) >= row["output_length"] > 1)


def _answered(row: dict[str, Any], speedup: float) -> Answered:
    decoding_s = row["last_token_s"] - row["first_token_s"]
    return Answered(
        session=row["session_id"],
        ttft_s=(row["first_token_s"] - row["sent_s"]) * speedup,
        tpot_s=decoding_s / (row["completion_tokens"] - 1) * speedup,
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"] or 0,
    )
