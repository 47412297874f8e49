"""The fleet of an experiment at loads around one saturation rate, and its options."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.bench.options import UNSET, flag, named
from analysis.league.fleet import EngineFleet, Scale, given_scale
from analysis.league.profiles import PROFILES
from replayer.arguments import InputError, count, not_negative, positive, positive_count
from replayer.virtual.arrivals import LoadRules
from replayer.virtual.load import Source


class CapacityError(InputError):
    """The experiment cannot be run as asked; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class CapacityOptions:
    """The options; times in virtual seconds. `horizon_s` None: by the trace."""

    trace: Path = flag(Path, "trace file, as for replay", name="")
    profile: str = flag(str, f"engines and network: {', '.join(PROFILES)}", "h100")
    instances: int = flag(positive_count, "engines", 8)
    seeds: int = flag(positive_count, "runs of each cell", 1)
    first_seed: int = flag(count, "lowest of the seeds, which are consecutive", 0)
    given: Scale | None = flag(
        given_scale,
        "RATE:KV: load 1.0 and KV tokens per engine (default: searched for)",
        None,
        name="scale",
        shown=UNSET,
    )
    horizon_s: float | None = flag(
        positive, "virtual seconds of load (default: by the trace)", None, shown=UNSET
    )
    think_cap_s: float = flag(not_negative, "longest pause between two turns, seconds", 60.0)
    timeout_s: float = flag(positive, "seconds to the first token after which clients leave", 60.0)
    jobs: int = flag(positive_count, "worker processes", 1, shown=os.cpu_count() or 1)
    json: Path | None = flag(Path, "file for all rows", None)

    def check(self) -> None:
        """Raise CapacityError for an unknown name."""
        named("profile", (self.profile,), PROFILES, CapacityError)

    @property
    def drawn(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def load(self) -> Source:
        """Read the trace, as far as a fleet can serve it at all."""
        kv_tokens = None if self.given is None else self.given.kv_tokens
        return PROFILES[self.profile].read(self.trace, self.timeout_s, kv_tokens)


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace and the fleet that plays it; `rules` are those of load 1.0."""

    source: Source
    scale: Scale
    rules: LoadRules
    fleet: EngineFleet

    def at(self, load: float, seed: int) -> LoadRules:
        """Return the rules of a load."""
        return replace(self.rules, rate=load * self.scale.rate, seed=seed)
