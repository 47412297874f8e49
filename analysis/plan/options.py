"""The options of `analyze plan`, and what a list of policies stands for."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.bench.options import UNSET, flag, named
from analysis.league.profiles import PROFILES
from analysis.plan.measured import CLAIRVOYANT, STATIC
from planner.core.predict import PREDICTORS
from replayer.arguments import (
    InputError,
    count,
    names,
    not_negative,
    number,
    positive,
    positive_count,
)
from replayer.engine.types import EngineOptions
from replayer.loads import LOADS

FIXED = re.compile(rf"{STATIC}-(\d{{1,3}})(?:\.\.(\d{{1,3}}))?")


def _startups(text: str) -> tuple[float, ...]:
    values = tuple(not_negative(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be seconds >= 0, comma separated")
    return values


def _slo(text: str) -> tuple[float, float]:
    """Read TTFT/ITL in seconds."""
    ttft, _, itl = text.partition("/")
    if not itl:
        raise argparse.ArgumentTypeError(f"must be TTFT/ITL in seconds, not {text!r}")
    return positive(ttft), positive(itl)


def _ratio(text: str) -> float:
    value = number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number in 0 to 1, not {text!r}")
    return value


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options; times are virtual seconds."""

    loads: Sequence[str] = flag(
        str,
        f"loads: {', '.join(LOADS)}, or trace files with times of arrival",
        ("step",),
        name="",
        nargs="*",
        metavar="LOAD",
    )
    policies: tuple[str, ...] = flag(
        names,
        "static, static-N, static-N..M, clairvoyant, and planners: founding, founding-load, "
        "founding-throughput, reserve; comma separated",
        (STATIC, CLAIRVOYANT, "founding"),
    )
    startups_s: tuple[float, ...] = flag(
        _startups, "seconds from an order to a running instance", (0.0, 30.0, 300.0), name="startup"
    )
    spread: float = flag(
        positive, "p90 of a start-up over its median, drawn by seed; 1: all alike", 1.0
    )
    grace_s: float | None = flag(
        not_negative,
        "seconds after which an instance that drains is gone, its streams cut "
        "(default: once they have ended)",
        None,
        shown=UNSET,
    )
    slo: tuple[float, float] | None = flag(
        _slo,
        "TTFT/ITL in seconds (default: each load's own)",
        None,
        metavar="TTFT/ITL",
        shown=UNSET,
    )
    attain: float | None = flag(
        _ratio,
        "share of requests within the SLO that the clairvoyant keeps "
        "(default: that of the largest fixed fleet less a point)",
        None,
        shown=UNSET,
    )
    seeds: int = flag(positive_count, "runs per policy, load and start-up", 1)
    first_seed: int = flag(count, "lowest of the seeds, which are consecutive", 1)
    most: int | None = flag(
        positive_count,
        "most replicas (default: each load's own)",
        None,
        name="max-replicas",
        shown=UNSET,
    )
    gpus: int = flag(positive_count, "GPUs per instance", 1)
    profile: str = flag(str, f"engines, of the league's: {', '.join(PROFILES)}", "h100")
    thin: int = flag(
        positive_count,
        "keeps one request in so many, on engines so many times as slow: the fleet is as large, "
        "the run shorter",
        1,
    )
    kv_tokens: int = flag(
        positive_count,
        "KV of an engine",
        EngineOptions().num_blocks * EngineOptions().block_size,
    )
    timeout_s: float = flag(
        positive, "seconds to the first token after which a request fails", 60.0
    )
    effort: int = flag(count, "runs of the clairvoyant's local search", 12)
    predictors: tuple[str, ...] | None = flag(
        names,
        f"judges predictors of the arrivals instead: all, or of {', '.join(PREDICTORS)}",
        None,
    )
    interval_s: float = flag(positive, "interval of --predictors, seconds", 30.0)
    traces: Path | None = flag(Path, "folder of recorded loads' traces", None, metavar="DIR")
    jobs: int = flag(positive_count, "worker processes", 1, shown=os.cpu_count() or 1)
    json: Path | None = flag(Path, "file for all runs", None)

    def check(self, planners: Sequence[str]) -> None:
        """Raise InputError for an unknown name; `planners` are those that are known."""
        named("profile", (self.profile,), PROFILES, InputError)
        named("predictors", self.predictors or (), ("all", *PREDICTORS), InputError)
        if self.spread < 1.0:
            raise InputError(f"--spread: must be a number >= 1, not {self.spread:g}")
        if not self.policies:
            raise InputError("--policies: must not be empty")
        for policy in self.policies:
            known = (STATIC, CLAIRVOYANT, *planners)
            if policy not in known and not FIXED.fullmatch(policy):
                raise InputError(
                    f"--policies: must be of {', '.join(known)}, {STATIC}-N, {STATIC}-N..M, "
                    f"not {policy}"
                )

    @property
    def judged(self) -> tuple[str, ...]:
        """Names of the predictors that are asked for."""
        asked = self.predictors or ()
        return tuple(PREDICTORS) if "all" in asked else asked

    @property
    def drawn(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def fixed(self, least: int, most: int) -> list[int]:
        """Sizes of the fixed fleets that are asked for; InputError for those out of bounds."""
        sizes: set[int] = set()
        for policy in self.policies:
            if policy == STATIC:
                sizes |= set(range(least, most + 1))
            elif found := FIXED.fullmatch(policy):
                first = int(found[1])
                last = int(found[2] or first)
                if not least <= first <= last <= most:
                    raise InputError(f"--policies: {policy}: must be of {least} to {most} replicas")
                sizes |= set(range(first, last + 1))
        return sorted(sizes)
