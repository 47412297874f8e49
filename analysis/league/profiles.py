"""Engine profiles: the engines of a fleet, and the network to them.

A policy is chosen on some engines and meets others. `h100` are those on which the default policy
was chosen: equal, at no distance, with vLLM's gauges, and with the form that its model of time
assumes. Each of the others differs from them in what such a choice could rely on.

`foreign` is Dynamo's engine simulator behind its own frontend. Prefill takes the same time per
token whatever the context. Blocks have 64 tokens. Only the `cached_tokens` of answers report the
KV, and there is no KV connector. A prompt is tokenised and forwarded before the engine sees it. Its
way has noise; `foreign-far` has four times as much, `foreign-gauges` tells size and use of the KV.
`slow-start`: fresh engines are slow, and one joins while the others serve. `mixed`: every second
GPU is of the generation before, with less KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.league.fleet import EngineFleet, engines
from replayer.engine.costs import A100, MOCKER, IntakeCost
from replayer.engine.types import EngineOptions
from replayer.virtual.load import LeftOut, Source, load_source
from replayer.virtual.requests import WayNoise


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engines of one kind; `kv_ratio`: their KV over the mean of the fleet."""

    options: EngineOptions
    kv_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A fleet's kinds of engines, dealt in turn, and the way to them.

    `block_tokens`: size of the engines' blocks, None for one that keeps runs short. The last engine
    joins when `late_ratio` of the load's horizon has passed. `options`: fields of RouterConfig.
    """

    kinds: tuple[EngineKind, ...] = (EngineKind(EngineOptions()),)
    block_tokens: int | None = None
    reports_kv: bool = True
    way: WayNoise = field(default_factory=WayNoise)
    late_ratio: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def fleet(
        self,
        source: Source,
        instances: int,
        kv_tokens: float,
        timeout_s: float,
        horizon_s: float = 0.0,
    ) -> EngineFleet:
        """Make a fleet with this much KV per engine; without a horizon no engine joins late.

        An engine of a kind with less KV has room for the longest request, if the others have.
        """
        least = min(kv_tokens, source.longest_tokens)
        kinds = [self.kinds[number % len(self.kinds)] for number in range(instances)]
        made = [
            engines(1, max(kind.kv_ratio * kv_tokens, least), source.block_tokens, kind.options)
            for kind in kinds
        ]
        late_s = self.late_ratio * horizon_s if instances > 1 else 0.0
        return EngineFleet(
            engines=tuple(engine for one in made for engine in one),
            timeout_s=timeout_s,
            longest_tokens=source.longest_tokens,
            options=dict(self.options),
            way=self.way,
            joins_s=(0.0,) * (instances - 1) + (late_s,) if late_s else (),
            reports_kv=self.reports_kv,
        )

    def read(self, trace: Path, timeout_s: float, kv_tokens: float | None = None) -> Source:
        """Read a trace without what no engine can serve in time, or hold in a KV that is given.

        In time: the prefill alone, with nothing cached, takes no longer than the client waits.
        """

        def serves(prompt_tokens: int, output_tokens: int) -> bool:
            if kv_tokens is not None and prompt_tokens + output_tokens > kv_tokens:
                return False
            alone_s = min(kind.options.alone_s(prompt_tokens) for kind in self.kinds)
            return alone_s <= timeout_s

        return load_source(trace, self.block_tokens, serves)


FRONTEND = IntakeCost(fixed_s=0.02, per_token_s=2e-6)
"""A frontend of an engine: 20 ms from the proxy and back, tokenisation at 500,000 tokens/s."""
NOISE_S, FAR_NOISE_S = 0.005, 0.02
WARM_UP_STEPS, WARM_UP_FACTOR = 20, 5.0
LATE_RATIO = 0.4
OLDER_KV_RATIO = 2 / 3
"""KV of the older GPUs of `mixed` over the mean; the newer ones have twice as much."""

H100 = Profile()
FOREIGN = Profile(
    kinds=(EngineKind(EngineOptions(step=MOCKER, intake=FRONTEND)),),
    block_tokens=64,
    reports_kv=False,
    way=WayNoise(NOISE_S),
    options={"kv_connector": "none"},
)
PROFILES: dict[str, Profile] = {
    "h100": H100,
    "foreign": FOREIGN,
    "foreign-far": replace(FOREIGN, way=WayNoise(FAR_NOISE_S)),
    "foreign-gauges": replace(FOREIGN, reports_kv=True),
    "slow-start": Profile(
        kinds=(
            EngineKind(EngineOptions(warm_up_steps=WARM_UP_STEPS, warm_up_factor=WARM_UP_FACTOR)),
        ),
        late_ratio=LATE_RATIO,
    ),
    "mixed": Profile(
        kinds=(
            EngineKind(EngineOptions(), 2.0 - OLDER_KV_RATIO),
            EngineKind(EngineOptions(step=A100), OLDER_KV_RATIO),
        )
    ),
}


def left_out(left: LeftOut) -> str:
    """Say in one line what of the trace is no part of the load."""
    return (
        f"left out: {left.requests:,} requests of {left.sessions:,} sessions, as no engine serves "
        f"a prompt of {left.shortest_tokens:,} tokens or more in time, or no KV holds it"
    )
